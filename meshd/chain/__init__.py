"""One answer across several nodes: an entry that owns the request, hops that compute its ranges, and what both do when a node is
slow or gone.

`session` decides for the entry and `hop` for a range, as pure cores; `entry` and `relay` are their shells on trio, `courier`
carries the messages between nodes, `service` is all of it as the daemon holds it. `request` is the contract with the API. Which
nodes there are to choose from is the routing's business, what a token means the API's.
"""
