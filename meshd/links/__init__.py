"""Links between peers, and between a daemon and its engine worker: frames, streams, TLS, the pool.

``wire`` is the contract. ``frame``, ``flow``, ``assemble``, ``fault`` and ``multiplex`` are pure: one state machine for every kind
of link. ``peer_link`` runs it on trio, ``pool`` keeps the links of a node, ``tls`` and ``hello`` decide who may be at the other end.
"""
