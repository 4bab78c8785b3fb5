"""What the chain's pure cores ask of their shells. Plain data.

`Send` is both cores'; `Begin`, `Compute`, `ReadLog` and `Forget` are a hop's; the rest are an entry's session's.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshd.chain.messages import ChainMessage
from meshd.chain.recovery import Swap
from meshd.chain.request import Recovery
from meshd.errors import MeshdError
from meshd.inference.engine import Choice, Opening, Run
from meshd.vocabulary import LayerRange, NodeId, Route, SessionId


@dataclass(frozen=True, slots=True)
class Send:
    """Bring ``message`` to ``to``; ``via`` passes it on if there is no live link to ``to``."""

    to: NodeId
    message: ChainMessage
    via: NodeId | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Ask the engine for a run; settle with what came of it."""

    session: SessionId
    layers: LayerRange
    ticket: int
    run: Run


@dataclass(frozen=True, slots=True)
class Begin:
    """Ask the engine what it keeps of a prompt; settle with what came of it."""

    session: SessionId
    layers: LayerRange
    attempt: int
    opening: Opening


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Ask the engine for rows ``[start, end)`` sent downstream; settle with what came of it."""

    session: SessionId
    layers: LayerRange
    ticket: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The session is over here: drop the engine's state, stop its computations."""

    session: SessionId


HopEffect = Send | Begin | Compute | ReadLog | Forget


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens for the client, in order."""

    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """Keep a link to ``node``; if it ends or cannot be made call unreachable with this ticket."""

    node: NodeId
    ticket: int


@dataclass(frozen=True, slots=True)
class Failover:
    """Another route is tried. ``hedge``: beside the one that runs."""

    swaps: tuple[Swap, ...]
    route: Route
    hedge: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """A token came over a changed route."""

    recovery: Recovery


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete. ``reason``: stop or length."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The request cannot be answered."""

    error: MeshdError


SessionEffect = Send | Emit | Watch | Failover | Recovered | Finish | Fail
