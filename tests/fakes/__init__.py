"""Stand-ins for the other side of a seam, scripted by tests."""
