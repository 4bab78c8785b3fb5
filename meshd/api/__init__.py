"""HTTP: the server, the routes, and everything that clients see of a node.

Built by the daemon: a `Node` (what the API needs of it), `Guards` (who may call), an `App`, listeners from `listen` and an
`HttpServer`.
"""
