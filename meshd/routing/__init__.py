"""Which nodes a request runs through: candidates from the directory, a bandit over what was measured. Pure."""
