"""Membership: who is in the room, what they hold, how they are. No coordinator, no clock that has to agree, no multicast needed.

A daemon makes a `node.GossipService` and hands it sockets, keys and links. Everything that decides is pure and runs in the
simulator of ``tests/sim/gossip_net.py`` as it runs here; ``benchmarks/membership_sim.py`` measures it:

======================================  ======  ======  ======  ======  ======
members                                 2-3     5       10      20      40
======================================  ======  ======  ======  ======  ======
killed: suspect everywhere, median s    1.5     1.5     1.5     1.6     1.6
killed: dead everywhere, median / max   5.5/6.3 5.6/6.7 5.5/6.5 6.8/7.9 7.9/9.0
joined, left: seen by all, s            0.1     0.1     0.1     0.1     0.1
bytes a second and node, with health    300     390     550     790     790
======================================  ======  ======  ======  ======  ======

Membership alone costs 235 bytes a second and node in any room. With 10 and 20 % of all packets lost nobody in a room of 20 is
declared dead in 120 s, with 30 % likewise; over loopback sockets, sealed, the times are the same and a node costs 0.4 % of a
slow core.
"""
