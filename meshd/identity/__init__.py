"""Who a node is and which room it belongs to: the node key, the mesh key ring and what is derived from them.

The state folder and its lock live here too, because an identity is only as good as the folder that keeps it.
"""
