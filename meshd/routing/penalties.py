"""Who lost whom lately. A lost pair is avoided for `PENALTY_S`; a node only once two reporters lost it.

One reporter's trouble may be its own cable, so it must not take a node away from everybody. Penalties order choices; they
never leave a request without a route (see `bandit`). Bounded: expired pairs go with every report.
"""

from __future__ import annotations

from typing import Final

from meshd.vocabulary import NodeId

PENALTY_S: Final = 30.0
_MAX_PAIRS: Final = 4096


class Penalties:
    """Pairs (reporter, node) with the time each ends."""

    def __init__(self) -> None:
        self._until: dict[tuple[NodeId, NodeId], float] = {}

    def report(self, node: NodeId, reporter: NodeId, now: float) -> None:
        """``reporter`` lost ``node``."""
        self._until = {pair: until for pair, until in self._until.items() if now < until}
        if len(self._until) < _MAX_PAIRS or (reporter, node) in self._until:
            self._until[reporter, node] = now + PENALTY_S

    def pair(self, reporter: NodeId, node: NodeId, now: float) -> bool:
        """``reporter`` should not send to ``node`` now."""
        return now < self._until.get((reporter, node), now)

    def nodes(self, now: float) -> frozenset[NodeId]:
        """Nodes that two or more reporters lost."""
        seen: dict[NodeId, int] = {}
        for (_, node), until in self._until.items():
            if now < until:
                seen[node] = seen.get(node, 0) + 1
        return frozenset(node for node, reporters in seen.items() if reporters >= 2)

    def touched(self, now: float) -> frozenset[NodeId]:
        """Nodes that anybody lost: the last to be asked when it is open who will send to them."""
        return frozenset(node for (_, node), until in self._until.items() if now < until)
