"""The simulator of the whole node: the daemons that ship, many in one process, in a world that a seed decides.

Nothing of meshd is replaced but the machine under it (`world`): clock, scheduler's dice, randomness, threads, UDP and TCP. So
gossip, links, election, admission, routing, chain and API run together as they do on devices, and two minutes of a room of six
cost three seconds. `python -m tests.sim.whole SEED` runs one seed and prints what happened in it, line by line.
"""
