"""What entries and hops tell each other about one session. Plain data; `codec` puts it on a link.

A hop's address is (node, layers): one node may serve two ranges of one session. ``attempt`` counts the routes that the entry
has tried and ``seq`` its steps; both only grow, and (attempt, seq) orders everything a hop is asked to do. Positions are
absolute; a step's rows are the positions ``[start, start + n)``.

Who sends what:

* entry -> hop 0 -> ... -> exit: `Step`, its route shortened by one at each hop;
* a hop whose state ends before a step's start -> whoever sent the step: `Need`; the answer is `Fill`: rows to compute, to keep
  and not to pass on;
* the exit -> the entry: `Reply`; a hop that lost its next, or cannot serve -> the entry: `Lost`;
* when progress is missing, the entry -> every hop: `Ask`; the answer is `Progress`;
* the entry -> every hop before the first step of a long prompt: `Open`; the answer is `Opened`;
* the entry -> every hop: `End`.

Durations are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshd.chain.plan import Plan
from meshd.inference.engine import Choice
from meshd.vocabulary import Hop, LayerRange, NodeId, SessionId


@dataclass(frozen=True, slots=True)
class Trace:
    """What one hop did for a step: ``hold_ms`` from arrival to departure, of it ``compute_ms``; ``filled`` replayed rows.

    ``windows``: rows computed together equal rows computed one by one, so guesses may be sent.
    """

    compute_ms: float
    hold_ms: float
    filled: int
    windows: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Rows to run.

    ``emit`` trailing positions are drawn at the exit. ``n`` 0 prepares: the receiver fills itself up to ``start``, then asks
    the same of its next; the running session is not touched by it. ``trail`` is what the hops before the receiver did.
    ``guess`` are the ids of the last rows, as far as they are drafts: nobody may count on those rows. ``recent`` are the final
    ids before ``start``, as many as somebody may hold guesses of (`holding`).
    """

    plan: Plan
    seq: int
    start: int
    n: int
    emit: int
    remaining_ms: int
    reserve_tokens: int
    history: tuple[int, ...] = ()
    trail: tuple[Trace, ...] = ()
    rows: bytes = b""
    guess: tuple[int, ...] = ()
    recent: tuple[int, ...] = ()

    @property
    def session(self) -> SessionId:
        return self.plan.session

    @property
    def attempt(self) -> int:
        return self.plan.attempt

    @property
    def key(self) -> tuple[int, int]:
        return (self.plan.attempt, self.seq)

    @property
    def end(self) -> int:
        return self.start + self.n

    @property
    def layers(self) -> LayerRange:
        """The receiver's range."""
        return self.plan.route[0].layers


@dataclass(frozen=True, slots=True)
class Need:
    """The sending hop ``layers`` has ``have`` positions and wants those up to ``upto`` from the hop ``origin`` (None: entry)."""

    session: SessionId
    attempt: int
    seq: int
    layers: LayerRange
    origin: LayerRange | None
    have: int
    upto: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Rows ``[start, start + n)`` for the hop ``layers``, in answer to its `Need`."""

    session: SessionId
    attempt: int
    seq: int
    layers: LayerRange
    start: int
    n: int
    rows: bytes = b""

    @property
    def end(self) -> int:
        return self.start + self.n


@dataclass(frozen=True, slots=True)
class Reply:
    """The exit computed everything up to ``end``; ``choices`` are what the step asked to draw. ``prepared``: n was 0.

    ``guess`` as in the step: a choice counts only if every guess before its position came true.
    """

    session: SessionId
    attempt: int
    seq: int
    end: int
    choices: tuple[Choice, ...] = ()
    trail: tuple[Trace, ...] = ()
    prepared: bool = False
    guess: tuple[int, ...] = ()


class Why(StrEnum):
    """What happened to a hop. RESET, REFUSED, SILENT and ROWS speak of another node, the rest of the sender itself."""

    RESET = "reset"
    REFUSED = "refused"
    SILENT = "silent"
    FULL = "full"
    STALE = "stale"  # another range, model or engine generation than the step names
    ENGINE = "engine"
    ROWS = "rows"  # it sent rows that no honest stage makes


@dataclass(frozen=True, slots=True)
class Lost:
    """The hop ``layers`` at ``node`` cannot go on with ``attempt``."""

    session: SessionId
    attempt: int
    node: NodeId
    layers: LayerRange
    why: Why
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """Where is the step (attempt, seq)?"""

    session: SessionId
    attempt: int
    seq: int


class Phase(StrEnum):
    """Where a step is at one hop."""

    UNSEEN = "unseen"
    QUEUED = "queued"
    COMPUTING = "computing"
    NEEDING = "needing"
    SENT = "sent"


@dataclass(frozen=True, slots=True)
class Progress:
    """The answer to `Ask` by the hop ``layers``; ``have`` is how many positions it holds."""

    session: SessionId
    attempt: int
    seq: int
    layers: LayerRange
    phase: Phase
    have: int


@dataclass(frozen=True, slots=True)
class End:
    """Forget the session, unless a later attempt than ``attempt`` has reached you."""

    session: SessionId
    attempt: int


@dataclass(frozen=True, slots=True)
class Open:
    """The prompt of a session that begins, for the hop ``hop``: what of it does it hold already?

    The ids travel to every hop, and not keys of them: a hop that counted on keys it was told would give one tenant's rows to
    another for a wrong key. Whoever sees a residual could read the ids from it anyway.
    """

    session: SessionId
    attempt: int
    hop: Hop
    digest: str
    tenant: str
    reserve_tokens: int
    ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Opened:
    """The hop ``layers`` has the session's first ``have`` positions."""

    session: SessionId
    attempt: int
    layers: LayerRange
    have: int


ForEntry = Reply | Lost | Progress | Opened
"""What hops tell the entry. A name of its own, because a union in the line is made again for every message."""

ChainMessage = Open | Opened | Step | Need | Fill | Reply | Lost | Ask | Progress | End
