"""What each hop of a route cost, averaged over the tokens it made. Pure. Times in milliseconds.

A hop says how long it held a step and how much of that was compute. What is left of a round trip was spent on wires, and
clocks of different machines cannot say on which one, so every hop gets an equal share of it, beside its own waiting.
"""

from __future__ import annotations

from meshd.chain.messages import Trace
from meshd.chain.request import HopReport
from meshd.vocabulary import Hop, LayerRange, NodeId, Route


class Tally:
    """Sums per hop."""

    def __init__(self) -> None:
        self._sums: dict[tuple[NodeId, LayerRange], tuple[float, float, int]] = {}

    def add(self, route: Route, trail: tuple[Trace, ...], elapsed_ms: float, tokens: int) -> None:
        """``tokens`` came through ``route`` in one pass of ``elapsed_ms``."""
        if len(trail) != len(route):
            return
        wire_ms = max(0.0, elapsed_ms - sum(trace.hold_ms for trace in trail)) / len(route)
        for hop, trace in zip(route, trail, strict=True):
            compute, wire, count = self._sums.get((hop.node_id, hop.layers), (0.0, 0.0, 0))
            waited = max(0.0, trace.hold_ms - trace.compute_ms)
            self._sums[hop.node_id, hop.layers] = (compute + trace.compute_ms, wire + wire_ms + waited, count + tokens)

    def report(self, route: Route) -> tuple[HopReport, ...]:
        """The means of the hops of ``route``."""
        return tuple(self._mean(hop) for hop in route)

    def _mean(self, hop: Hop) -> HopReport:
        compute, wire, count = self._sums.get((hop.node_id, hop.layers), (0.0, 0.0, 0))
        return HopReport(hop.node_id, hop.layers, compute / max(1, count), wire / max(1, count))
