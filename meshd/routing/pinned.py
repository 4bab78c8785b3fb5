"""A route that the caller prescribes, node by node."""

from __future__ import annotations

from meshd.directory import Directory, Member
from meshd.errors import BadRoute
from meshd.vocabulary import Hop, LayerRange, NodeId, NodeStatus, Route


def pinned_route(directory: Directory, digest: str, num_layers: int, pinned: tuple[NodeId, ...]) -> Route:
    """Each hop starts at the previous end and runs as far as its node holds layers. Raises BadRoute saying what is wrong."""
    at = 0
    hops: list[Hop] = []
    for node_id in pinned:
        member = directory.get(node_id)
        if member is None:
            raise BadRoute(f"route: no node {node_id!r} in this room", param="route")
        label = directory.label(node_id)
        held = member.advert.layers
        if held is None or member.advert.digest != digest:
            raise BadRoute(f"route: {label} holds no layers of this model", param="route")
        if not member.routable:
            raise BadRoute(f"route: {label} takes no requests: {_why_not(member)}", param="route")
        if at >= min(held.end, num_layers):
            raise BadRoute(f"route: {label} holds {held} and adds nothing after layer {at}", param="route")
        if at not in held:
            raise BadRoute(f"route: {label} holds {held} and lacks layer {at}", param="route")
        hops.append(Hop(node_id, LayerRange(at, min(held.end, num_layers)), member.advert.generation))
        at = hops[-1].layers.end
    if at < num_layers:
        raise BadRoute(f"route: ends at layer {at} of {num_layers}", param="route")
    return tuple(hops)


def _why_not(member: Member) -> str:
    if member.state not in (NodeStatus.ALIVE, NodeStatus.SUSPECT):
        return f"it is {member.state}"
    if member.incompatible is not None:
        return member.incompatible
    if member.advert.draining:
        return "it is draining"
    return member.admission or ("its admission is pending" if member.admitted is None else "it was not admitted")
