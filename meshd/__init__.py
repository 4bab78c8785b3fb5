"""meshd: a room of unreliable devices serves one language model together."""

__version__ = "0.1.0"
