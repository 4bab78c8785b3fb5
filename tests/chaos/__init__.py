"""Chaos: its pure parts, and a room in a box under it."""
