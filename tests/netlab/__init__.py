"""Hosts in a box: network namespaces joined by a switch, for tests that need addresses, cuts and lossy links of their own.

`lab.NetLab` makes the network; `machine.Machine` boots a host in it with a process tree, a host name and a home of its own.
Linux, root, iproute2 and nftables; `lab.lacking()` says what is missing.
"""
