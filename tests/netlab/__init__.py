"""Machines in a box: hosts of a `meshd.cli.chaos.netlab` with a process tree, a host name, sshd and a home of their own."""
