"""The splice of a new route: who takes the place of hops that are lost, slow or leave. Pure.

Owns what a replacement is (`Swap`) and how several become one (`chained`). It must not know why a hop is replaced, nor who was
lost before: `detours` says whom to leave alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from meshd.chain.plan import MAX_HOPS
from meshd.vocabulary import Hop, LayerRange, NodeId, Route


class Replicas(Protocol):
    """What the session may know of the room: the directory and the planner behind one model."""

    def replace(self, layers: LayerRange, *, avoid: Collection[NodeId], arith: str, now: float) -> Route | None:
        """Hops that cover exactly ``layers``."""
        ...

    def pending(self, layers: LayerRange) -> bool:
        """True when somebody alive holds some of ``layers`` and is about to be proven."""
        ...

    def arith(self, node: NodeId) -> str: ...

    def stamp(self, node: NodeId) -> tuple[int, int] | None:
        """(epoch, generation): another one is another run of the node or its engine."""
        ...

    def draining(self, node: NodeId) -> bool: ...

    def expected_s(self, route: Route, rows: int) -> float:
        """What the members claim for ``rows`` rows through ``route``; 0 if they claim nothing."""
        ...

    def penalise(self, node: NodeId, *, reporter: NodeId, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Swap:
    """One hop replaced: ``to`` runs the first of ``layers`` now."""

    layers: LayerRange
    source: NodeId
    to: NodeId
    reason: str
    exact: bool


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A new route and what changed, or what nobody holds."""

    route: Route
    swaps: tuple[Swap, ...]
    missing: tuple[LayerRange, ...] = ()


def chained(before: tuple[Swap, ...], after: tuple[Swap, ...]) -> tuple[Swap, ...]:
    """Both as the client sees them: a replacement that was replaced itself never counted."""
    merged = list(before)
    for swap in after:
        at = next((i for i, old in enumerate(merged) if old.to == swap.source and old.layers == swap.layers), None)
        if at is None:
            merged.append(swap)
        else:
            merged[at] = Swap(swap.layers, merged[at].source, swap.to, swap.reason, swap.exact)
    return tuple(merged)


def reroute(
    route: Route,
    bad: Collection[NodeId],
    *,
    reason: str,
    replicas: Replicas,
    tiers: Iterable[Collection[NodeId]],
    now: float,
) -> Rerouted:
    """``route`` with the hops at ``bad`` nodes replaced; ``tiers`` are the sets of nodes to avoid, strictest first."""
    tiers = list(tiers)
    hops: list[Hop] = []
    swaps: list[Swap] = []
    missing: list[LayerRange] = []
    for group in _groups(route, bad):
        if group[0].node_id not in bad:
            hops += group
            continue
        found = _cover(group, replicas, tiers, now)
        if found is None:
            missing.append(LayerRange(group[0].layers.start, group[-1].layers.end))
            continue
        hops += found
        for old in group:
            to = next(hop.node_id for hop in found if hop.layers.end > old.layers.start)
            exact = replicas.arith(old.node_id) == replicas.arith(to)
            swaps.append(Swap(old.layers, old.node_id, to, reason, exact))
    if missing:
        return Rerouted((), (), tuple(missing))
    if len(hops) > MAX_HOPS or any(a.layers.end != b.layers.start for a, b in pairwise(hops)):
        return Rerouted((), (), tuple(hop.layers for hop in route if hop.node_id in bad))
    return Rerouted(tuple(hops), tuple(swaps))


def _groups(route: Route, bad: Collection[NodeId]) -> Iterable[list[Hop]]:
    """Neighbours with the same fate together, so that one replica may take the layers of several lost hops."""
    group: list[Hop] = []
    for hop in route:
        if group and (hop.node_id in bad) != (group[0].node_id in bad):
            yield group
            group = []
        group.append(hop)
    yield group


def _cover(group: list[Hop], replicas: Replicas, tiers: list[Collection[NodeId]], now: float) -> list[Hop] | None:
    arith = replicas.arith(group[0].node_id)
    whole = LayerRange(group[0].layers.start, group[-1].layers.end)
    for avoid in tiers:
        found = replicas.replace(whole, avoid=avoid, arith=arith, now=now)
        if found:
            return list(found)
        if len(group) > 1:
            parts = [
                replicas.replace(hop.layers, avoid=avoid, arith=replicas.arith(hop.node_id), now=now) for hop in group
            ]
            if all(parts):
                return [hop for part in parts if part for hop in part]
    return None
