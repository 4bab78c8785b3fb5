"""What is wrong or slow in a room, and what cures it.

Pure functions of the documents that every node serves (``/status``, ``/mesh/peers``, ``/mesh/hive``, ``/v1/routing``), of the
event log, and of what a caller found out by trying (`Probe`). The dashboard shows the findings of one node's documents; ``meshd
doctor`` adds the probes. Nothing here decides anything for the mesh: it only tells people.
"""
