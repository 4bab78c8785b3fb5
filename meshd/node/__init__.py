"""The parts of a daemon that are neither a protocol nor an interface: which model, how to load it, what to say of oneself.

`meshd/daemon.py` composes these with gossip, links, chain and API. Each module here owns one of the daemon's own affairs.
"""
