"""How a route is written: for people by labels, for statistics by node ids."""

from __future__ import annotations

from meshd.directory import Directory
from meshd.vocabulary import Route


def label(directory: Directory, digest: str, hops: Route) -> str:
    """``smollm2-135m|n1[0:15]->n2[15:30]``: what is shown. Names may change, and two nodes may share one."""
    models = (m.advert.model for hop in hops if (m := directory.get(hop.node_id)) is not None and m.advert.model)
    stages = "->".join(directory.label(hop.node_id) + hop.layers.signature() for hop in hops)
    return f"{next(models, digest)}|{stages}"


def arm_key(digest: str, hops: Route) -> str:
    """What statistics are filed under: stable across renames and restarts of a node."""
    return f"{digest}|" + "->".join(hop.node_id + hop.layers.signature() for hop in hops)
