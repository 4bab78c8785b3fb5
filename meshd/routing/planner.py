"""The contract between whoever runs a request and whoever knows good routes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from meshd.directory import Directory
from meshd.vocabulary import LayerRange, NodeId, Route


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """A route and why it was taken (``routing`` in an answer). ``digest`` is the model's; what came of it is filed under it."""

    hops: Route
    mode: str
    signature: str
    digest: str = ""


class Planner(Protocol):
    """Chooses routes from a directory and learns from what came of them. Pure: time and randomness are inside it only as
    arguments given at construction or here."""

    def choose(
        self, directory: Directory, digest: str, num_layers: int, *, pinned: tuple[NodeId, ...] = (), now: float
    ) -> PlannedRoute:
        """A route for a new request. Raises StageUnavailable(missing) or BadRoute."""
        ...

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
        """Hops that cover exactly ``layers`` without the nodes in ``avoid`` (penalised nodes last, same ``arith`` first);
        None if nobody is left."""
        ...

    def penalise(self, node: NodeId, *, reporter: NodeId, now: float) -> None:
        """``reporter`` lost ``node``: the pair for 30 s, the node itself only when two reporters lost it."""
        ...

    def begin(self, route: PlannedRoute, now: float) -> None:
        """A request starts on it (outstanding counts steer the next choice)."""
        ...

    def finish(self, route: PlannedRoute, ran: Route, *, tokens: int, seconds: float, failed: bool, now: float) -> None:
        """What came of it: ``ran`` is the route that really produced the tokens."""
        ...
