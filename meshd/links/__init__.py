"""Links between peers, and between a daemon and its engine worker: frames, streams, TLS, the pool.

``wire`` is the contract. ``frame``, ``flow``, ``assemble``, ``fault`` and ``multiplex`` are pure: one state machine for every
kind of link. ``peer_link`` and ``peer_stream`` run it on trio, ``pool`` keeps the links of a node, ``doorkeeper`` (with ``tls``
and ``hello``) decides who may be at the other end.
"""
