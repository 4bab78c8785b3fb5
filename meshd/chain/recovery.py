"""Who is replaced by whom: the choice an entry makes from its evidence. Pure.

Owns two memories of one request: who was lost, when and how often (`Blame`), and who was heard last (`Pulse`); and the splice
of a new route (`reroute`). It must not know tokens, steps or timers; `session` decides when to ask.

The order in which hops are tried for the layers of a lost one:

1. nobody who was lost or suspected in the last 30 s (a node that came back with another epoch or engine is forgiven);
2. anybody but who is bad right now: if everybody is penalised the penalty is ignored;
3. if another hop reported the loss: somebody else in that hop's place, once, for it may be their link that broke;
4. the lost node itself, if it was a broken link or a refusal: perhaps it has restarted.

For one token a node is tried at most twice (once if it was silent or full), so two dead replicas do not play ping-pong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from meshd.chain.messages import MAX_HOPS, Why
from meshd.vocabulary import Hop, LayerRange, NodeId, Route

PENALTY_S: Final = 30.0
QUIET_S: Final = 0.45  # a watched node answers a PING every 0.25 s
SILENCE_S: Final = 1.5  # silent that long is dead


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


@dataclass(slots=True)
class _Case:
    why: Why | None  # None: slow or draining
    at: float
    stamp: tuple[int, int] | None
    times: int  # losses since the last token

    @property
    def hopeless(self) -> bool:
        """Not worth another try for this token: each costs silence its 1.5 s, and the rest may have restarted once."""
        return self.times >= (1 if self.why in (Why.SILENT, Why.FULL) else 2)


class Blame:
    """Who was lost or suspected while this request ran."""

    def __init__(self) -> None:
        self._cases: dict[NodeId, _Case] = {}

    def add(self, node: NodeId, why: Why | None, replicas: Replicas, now: float) -> None:
        """``node`` was lost (``why``) or is slow (None)."""
        old, stamp = self._cases.get(node), replicas.stamp(node)
        times = old.times if old and old.stamp == stamp else 0
        self._cases[node] = _Case(why, now, stamp, times + (why is not None))

    def avoid(self, replicas: Replicas, now: float) -> set[NodeId]:
        """Nodes to leave alone while there are others."""
        return {
            node
            for node, case in self._cases.items()
            if now < case.at + PENALTY_S and case.stamp == replicas.stamp(node)
        }

    def hopeless(self, replicas: Replicas) -> set[NodeId]:
        """Nodes that are not tried again for this token even if nobody else is left."""
        return {node for node, case in self._cases.items() if case.hopeless and case.stamp == replicas.stamp(node)}

    def full(self, node: NodeId) -> bool:
        """True when ``node`` had no room."""
        case = self._cases.get(node)
        return case is not None and case.why is Why.FULL

    def token(self, through: Iterable[NodeId]) -> None:
        """A token came: the nodes it came through are forgiven, the others may be tried again if need be."""
        for node in through:
            self._cases.pop(node, None)
        for case in self._cases.values():
            case.times = 0


class Pulse:
    """When each watched node was last heard. A node counts as heard when its watch begins.

    Silence is evidence of death only for a node that this one has heard before, or must reach itself (``direct``): a hop that
    only its neighbour can reach is its neighbour's to report.
    """

    def __init__(self, self_id: NodeId) -> None:
        self._self = self_id
        self._heard: dict[NodeId, float] = {}
        self._reached: set[NodeId] = set()

    def watch(self, node: NodeId, now: float, *, direct: bool) -> bool:
        """Begin; False if it is watched already."""
        if direct:
            self._reached.add(node)
        if node in self._heard:
            return False
        self._heard[node] = now
        return True

    def drop(self, node: NodeId) -> None:
        """End."""
        self._heard.pop(node, None)
        self._reached.discard(node)

    def heard(self, node: NodeId, at: float) -> None:
        """Anything came from ``node``."""
        if node in self._heard:
            self._reached.add(node)
            self._heard[node] = max(at, self._heard[node])

    def excuse(self, now: float) -> None:
        """This process itself was paused: nobody could be heard."""
        for node in self._heard:
            self._heard[node] = now

    def dead_at(self, node: NodeId) -> float:
        """When silence becomes death."""
        if node == self._self or node not in self._reached:
            return math.inf
        return self._heard[node] + SILENCE_S

    def quiet(self, node: NodeId, now: float) -> bool:
        """True when a PING has gone unanswered."""
        return node != self._self and node in self._heard and now >= self._heard[node] + QUIET_S


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
