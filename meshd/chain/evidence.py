"""What an entry holds against the nodes of one request: who was lost, when and how often (`Blame`), and who was heard last
(`Pulse`). Pure. Monotonic seconds.

For one token a node is tried at most twice (once if it was silent or full), so two dead replicas do not play ping-pong. A node
that came back with another epoch or engine is forgiven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from meshd.chain.messages import Why
from meshd.vocabulary import NodeId

PENALTY_S: Final = 30.0
QUIET_S: Final = 0.45  # a watched node answers a PING every 0.25 s
SILENCE_S: Final = 1.5  # silent that long is dead

Stamp = tuple[int, int]
"""(epoch, generation): another one is another run of the node or its engine."""


@dataclass(slots=True)
class _Case:
    why: Why | None  # None: slow or draining
    at: float
    stamp: Stamp | None
    times: int  # losses since the last token

    @property
    def hopeless(self) -> bool:
        """Not worth another try for this token: each costs silence its 1.5 s, and the rest may have restarted once."""
        return self.times >= (1 if self.why in (Why.SILENT, Why.FULL) else 2)


class Blame:
    """Who was lost or suspected while this request ran."""

    def __init__(self, stamp: Callable[[NodeId], Stamp | None]) -> None:
        self._stamp = stamp
        self._cases: dict[NodeId, _Case] = {}

    def add(self, node: NodeId, why: Why | None, now: float) -> None:
        """``node`` was lost (``why``) or is slow (None)."""
        old, stamp = self._cases.get(node), self._stamp(node)
        times = old.times if old and old.stamp == stamp else 0
        self._cases[node] = _Case(why, now, stamp, times + (why is not None))

    def avoid(self, now: float) -> set[NodeId]:
        """Nodes to leave alone while there are others."""
        return {
            node for node, case in self._cases.items() if now < case.at + PENALTY_S and case.stamp == self._stamp(node)
        }

    def hopeless(self) -> set[NodeId]:
        """Nodes that are not tried again for this token even if nobody else is left."""
        return {node for node, case in self._cases.items() if case.hopeless and case.stamp == self._stamp(node)}

    def full(self) -> set[NodeId]:
        """Nodes of those that had no room."""
        return {node for node in self.hopeless() if self._cases[node].why is Why.FULL}

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
