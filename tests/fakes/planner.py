"""A planner without opinions: any walk over routable members that reaches the end, longest hops first."""

from __future__ import annotations

from collections.abc import Callable, Collection

from meshd.directory import Directory, Member
from meshd.errors import BadRoute, StageUnavailable
from meshd.routing.planner import PlannedRoute
from meshd.vocabulary import Hop, LayerRange, NodeId, Route

Order = Callable[[list[Hop]], list[Hop]]


class FakePlanner:
    """``order`` decides among equals (default: by id, so the first member is always preferred)."""

    def __init__(self, order: Order | None = None) -> None:
        self._order = order or (lambda hops: hops)
        self.penalised: list[tuple[NodeId, NodeId]] = []
        self.finished: list[tuple[Route, int, bool]] = []
        self.outstanding = 0

    def choose(
        self, directory: Directory, digest: str, num_layers: int, *, pinned: tuple[NodeId, ...] = (), now: float
    ) -> PlannedRoute:
        if pinned:
            hops = self._pinned(directory, pinned, num_layers)
            return PlannedRoute(hops, "pinned", "pinned")
        found = self._walk(directory, digest, LayerRange(0, num_layers), frozenset(), "")
        if found is None:
            held = {i for m in directory.holders(digest) if m.advert.layers for i in range(*m.advert.layers.json())}
            missing = _ranges([i for i in range(num_layers) if i not in held])
            raise StageUnavailable(missing)
        return PlannedRoute(found, "cold", "->".join(hop.node_id[:4] for hop in found))

    def replace(
        self,
        directory: Directory,
        digest: str,
        layers: LayerRange,
        *,
        avoid: Collection[NodeId],
        arith: str,
        now: float,
    ) -> Route | None:
        return self._walk(directory, digest, layers, avoid, arith)

    def penalise(self, node: NodeId, *, reporter: NodeId, now: float) -> None:
        self.penalised.append((node, reporter))

    def begin(self, route: PlannedRoute, now: float) -> None:
        self.outstanding += 1

    def finish(self, route: PlannedRoute, ran: Route, *, tokens: int, seconds: float, failed: bool, now: float) -> None:
        self.outstanding -= 1
        self.finished.append((ran, tokens, failed))

    def _walk(
        self, directory: Directory, digest: str, layers: LayerRange, avoid: Collection[NodeId], arith: str
    ) -> Route | None:
        members = [m for m in directory.holders(digest) if m.node_id not in avoid]
        return self._extend(members, layers.start, layers.end, arith)

    def _extend(self, members: list[Member], at: int, end: int, arith: str) -> Route | None:
        hops = self._order([_hop(m, at, end) for m in members if m.advert.layers and at in m.advert.layers])
        hops.sort(key=lambda hop: -hop.layers.end)
        for hop in hops:
            if hop.layers.end == end:
                return (hop,)
            rest = self._extend(members, hop.layers.end, end, arith)
            if rest:
                return (hop, *rest)
        return None

    def _pinned(self, directory: Directory, pinned: tuple[NodeId, ...], num_layers: int) -> Route:
        hops, at = [], 0
        for node in pinned:
            member = directory.get(node)
            if member is None or member.advert.layers is None or at not in member.advert.layers:
                raise BadRoute(f"{node} does not hold layer {at}")
            hops.append(_hop(member, at, num_layers))
            at = hops[-1].layers.end
        if at != num_layers:
            raise BadRoute("the end is not reached")
        return tuple(hops)


def _hop(member: Member, at: int, end: int) -> Hop:
    assert member.advert.layers is not None
    return Hop(member.node_id, LayerRange(at, min(end, member.advert.layers.end)), member.advert.generation)


def _ranges(layers: list[int]) -> list[LayerRange]:
    out: list[LayerRange] = []
    for layer in layers:
        if out and out[-1].end == layer:
            out[-1] = LayerRange(out[-1].start, layer + 1)
        else:
            out.append(LayerRange(layer, layer + 1))
    return out
