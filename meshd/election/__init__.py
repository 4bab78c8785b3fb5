"""Who holds which layers: every node decides for itself, and all decide alike. Pure functions of adverts, never of health."""
