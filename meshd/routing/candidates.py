"""Routes that exist: every chain of holders from layer 0 to the model's end, and covers of one lost range.

Owns the search only. Knows nothing of measurements, requests or clocks; randomness is an argument and decides among equals
only, so that entries do not all pick the same replica.

A hop starts where the previous one ended and runs to the end of what its node holds, so a node takes part *inside* a wider
range too (a node with 0..40 serves 22..40 after a 0..22 hop), no node can come twice, and each start is the previous end by
construction. The search is bounded: up to `ENUMERATED` routes are listed in full, of a larger room `SPREAD` to `ENUMERATED`
are drawn that use as many different nodes as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from meshd.routing.prior import tokens_per_s
from meshd.vocabulary import Hop, LayerRange, NodeId, Route

ENUMERATED: Final = 64
SPREAD: Final = 16
SLOW: Final = 1.0
GONE: Final = 1000.0  # more than any route of slow hops
_STEPS: Final = 50_000  # looked at in one search, about 20 ms


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that may serve layers. ``doubt``: 0 for none, `SLOW` for jammed, `GONE` for suspect or penalised; whoever has
    any is wanted only when nobody else is left, and then the slow rather than the gone."""

    node_id: NodeId
    layers: LayerRange
    generation: int = 0
    arith: str = ""
    layer_ms: float = 1.0
    doubt: float = 0.0

    @property
    def doubtful(self) -> bool:
        return self.doubt > 0.0

    def hop(self, start: int, limit: int) -> Hop:
        """This node from ``start`` as far as it holds layers, not past ``limit``."""
        return Hop(self.node_id, LayerRange(start, min(self.layers.end, limit)), self.generation)


def missing(ranges: Iterable[LayerRange], layers: LayerRange) -> list[LayerRange]:
    """The parts of ``layers`` that no range covers, in order."""
    gaps: list[LayerRange] = []
    at = layers.start
    for held in sorted(ranges):
        if held.start > at:
            gaps.append(LayerRange(at, min(held.start, layers.end)))
        at = max(at, held.end)
        if at >= layers.end:
            return gaps
    gaps.append(LayerRange(at, layers.end))
    return gaps


def routes(holders: Sequence[Holder], num_layers: int, rng: Random) -> list[Route]:
    """Routes over the whole model, in an order that spreads: the best first, then those over the least used nodes.

    All of them if there are at most `ENUMERATED`, else some that differ in as many nodes as possible.
    """
    graph = _Graph(_shuffled(holders, rng), LayerRange(0, num_layers))
    if graph.count() == 0:
        return []
    if graph.count() > ENUMERATED:
        return _spread(graph)
    return _ordered(graph.all(), graph.layer_ms)


def cover(
    holders: Sequence[Holder], layers: LayerRange, rng: Random, cost: Callable[[Holder, Hop], tuple[float, ...]]
) -> Route | None:
    """The hops over exactly ``layers`` with the lexicographically least sum of ``cost``; None if nobody covers them."""
    graph = _Graph(_shuffled(holders, rng), layers)
    best: dict[int, tuple[tuple[float, ...], Route]] = {layers.end: ((), ())}
    for start in graph.backwards():
        for holder in graph.at[start]:
            hop = holder.hop(start, layers.end)
            rest = best.get(hop.layers.end)
            if rest is None:
                continue
            price = cost(holder, hop)
            total = tuple(a + b for a, b in zip(price, rest[0], strict=True)) if rest[0] else price
            if start not in best or total < best[start][0]:
                best[start] = total, (hop, *rest[1])
    found = best.get(layers.start)
    return found[1] if found else None


def _shuffled(holders: Sequence[Holder], rng: Random) -> list[Holder]:
    order = list(holders)
    rng.shuffle(order)
    return order


class _Graph:
    """Positions that a route can reach and who continues from each."""

    def __init__(self, holders: Sequence[Holder], layers: LayerRange) -> None:
        self.layers = layers
        self.layer_ms = {h.node_id: h.layer_ms for h in holders}
        self.at: dict[int, list[Holder]] = {}
        pending = [layers.start]
        while pending:
            start = pending.pop()
            if start in self.at or start >= layers.end:
                continue
            self.at[start] = [h for h in holders if start in h.layers]
            pending += {h.layers.end for h in self.at[start]}
        self._speeds: list[tuple[int, list[tuple[Holder, int, float]]]] = []
        self._ways: dict[int, int] = {layers.end: 1}
        for start in self.backwards():
            self._ways[start] = sum(self._ways[self.end_of(h)] for h in self.at[start])

    def backwards(self) -> list[int]:
        return sorted(self.at, reverse=True)

    def end_of(self, holder: Holder) -> int:
        return min(holder.layers.end, self.layers.end)

    def count(self) -> int:
        """How many routes there are."""
        return self._ways[self.layers.start]

    def all(self) -> list[Route]:
        """Every route; only called when they are few."""
        found: list[Route] = []
        partial: list[tuple[int, Route]] = [(self.layers.start, ())]
        while partial:
            start, hops = partial.pop()
            if start == self.layers.end:
                found.append(hops)
                continue
            partial += [
                (self.end_of(h), (*hops, h.hop(start, self.layers.end)))
                for h in self.at[start]
                if self._ways[self.end_of(h)]
            ]
        return found

    def widest(self, uses: dict[NodeId, int]) -> Route:
        """The route whose slowest hop is fastest when each use of a node so far has cost it a share of its speed."""
        best: dict[int, tuple[float, int, Holder | None]] = {self.layers.end: (float("inf"), 0, None)}
        for start, steps in self._steps():
            top = (0.0, 0)
            for h, end, speed in steps:
                rest_speed, rest_hops, _ = best[end]
                value = (min(speed / (1 + uses.get(h.node_id, 0)), rest_speed), rest_hops - 1)
                if value > top:
                    top = value
                    best[start] = (*value, h)
        hops: list[Hop] = []
        holder = best[self.layers.start][2]
        while holder is not None:
            hops.append(holder.hop(hops[-1].layers.end if hops else self.layers.start, self.layers.end))
            holder = best[hops[-1].layers.end][2]
        return tuple(hops)

    def steps(self) -> int:
        """How many continuations one pass over the graph looks at."""
        return sum(len(steps) for _, steps in self._steps())

    def _steps(self) -> list[tuple[int, list[tuple[Holder, int, float]]]]:
        """Positions from the end, each with who gets on from there to where a route can be finished, and how fast."""
        if not self._speeds:
            self._speeds = [
                (
                    start,
                    [
                        (h, end, tokens_per_s(h.layer_ms, end - start))
                        for h in self.at[start]
                        if self._ways[end := self.end_of(h)]
                    ],
                )
                for start in self.backwards()
            ]
        return self._speeds


def _spread(graph: _Graph) -> list[Route]:
    uses: dict[NodeId, int] = {}
    found: dict[Route, None] = {}
    for _ in range(max(SPREAD, min(ENUMERATED, _STEPS // graph.steps()))):
        route = graph.widest(uses)
        found[route] = None
        for hop in route:
            uses[hop.node_id] = uses.get(hop.node_id, 0) + 1
    return list(found)


def _ordered(found: list[Route], layer_ms: dict[NodeId, float]) -> list[Route]:
    uses: dict[NodeId, int] = {}
    ordered: list[Route] = []

    def value(route: Route) -> tuple[float, int]:
        speeds = (
            tokens_per_s(layer_ms[hop.node_id], len(hop.layers)) / (1 + uses.get(hop.node_id, 0)) for hop in route
        )
        return min(speeds), -len(route)

    while found:
        best = max(found, key=value)
        found.remove(best)
        ordered.append(best)
        for hop in best:
            uses[hop.node_id] = uses.get(hop.node_id, 0) + 1
    return ordered
