"""All hops of one node: which session a message is for, what is refused, when a session is forgotten. Pure.

Owns the table of `HopSession` and the checks of a step against what this node holds (model digest, range, engine generation,
addressee). Sessions end by the entry's `End`, by 60 s of silence, or 30 s after their entry was seen to die; the ids of ended
ones are kept a while so that a message which was still under way does not bring a session back. Times are monotonic seconds.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshd.chain.effects import Begin, Compute, Forget, ReadLog, Send
from meshd.chain.effects import HopEffect as Effect
from meshd.chain.hop import HopSession
from meshd.chain.messages import Ask, ChainMessage, End, Fill, Lost, Need, Open, Opened, Phase, Progress, Step, Why
from meshd.inference.engine import Opening, Ran
from meshd.vocabulary import Hop, LayerRange, NodeId, SessionId

SILENCE_S: Final = 60.0
ORPHAN_S: Final = 30.0
MAX_ENDED: Final = 1024


@dataclass(frozen=True, slots=True)
class Held:
    """What this node's engine holds now."""

    digest: str
    layers: LayerRange
    generation: int
    windows: bool = False  # rows computed together equal rows computed one by one


@dataclass(frozen=True, slots=True)
class Rows:
    """The boundary log's answer."""

    rows: bytes


@dataclass(frozen=True, slots=True)
class Missing:
    """The engine has ``have`` positions only."""

    have: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine refused or died."""

    why: Why
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """The engine began the session with ``have`` positions."""

    have: int


Outcome = Ran | Rows | Missing | Failed | Kept


class _Room:
    """One session at this node: its hops by range, and when it is forgotten."""

    __slots__ = ("begun", "entry", "forget_at", "hops", "orphaned")

    def __init__(self, entry: NodeId, forget_at: float) -> None:
        self.entry = entry
        self.orphaned = False
        self.forget_at = forget_at
        self.hops: dict[LayerRange, HopSession] = {}
        self.begun: dict[LayerRange, int] = {}  # positions that the engine had of the prompt, until the first step


class Hops:
    """The hop side of a node. ``held`` and ``computing`` (sessions with a step in the engine, running or waiting) are set by
    whoever owns the engine, before each message. Beyond either limit new sessions are refused; those that run go on."""

    def __init__(self, self_id: NodeId, *, max_sessions: int = 256, max_computing: int = 256) -> None:
        self.self_id = self_id
        self.held: Held | None = None
        self.computing = 0
        self._max_sessions = max_sessions
        self._max_computing = max_computing
        self._tickets = itertools.count(1)
        self._rooms: dict[SessionId, _Room] = {}
        self._ended: OrderedDict[SessionId, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def running(self) -> int:
        """Sessions whose entry is there: those that somebody waits for."""
        return sum(not room.orphaned for room in self._rooms.values())

    def entry_of(self, session: SessionId) -> NodeId | None:
        """Who owns a session that runs here."""
        room = self._rooms.get(session)
        return room.entry if room else None

    def upstream_of(self, session: SessionId) -> NodeId | None:
        """Where a reply for a session goes if its entry cannot be reached."""
        room = self._rooms.get(session)
        return next(iter(room.hops.values())).upstream if room and room.hops else None

    def receive(self, message: ChainMessage, source: NodeId, now: float) -> list[Effect]:
        """A message for a hop of this node. Replies and the like are not for hops and are ignored."""
        room = self._rooms.get(message.session)
        if room is not None:
            room.forget_at = now + SILENCE_S
            room.orphaned = False
        effects: list[Effect] = []
        match message:
            case Open():
                effects = self._open(message, source, now)
            case Step():
                effects = self._step(message, source, now)
            case Fill():
                hop = room.hops.get(message.layers) if room else None
                effects = hop.fill(message, now) if hop else []
            case Need():
                hop = room.hops.get(message.origin) if room and message.origin else None
                effects = hop.need(message, source) if hop else []
            case Ask():
                effects = list(self._answer(message, room, source))
            case End() if room is None or source == room.entry:
                effects = self._end(message)
        return effects

    def settle(self, job: Begin | Compute | ReadLog, outcome: Outcome, now: float) -> list[Effect]:
        """What came of a `Begin`, `Compute` or `ReadLog` that this emitted."""
        room = self._rooms.get(job.session)
        if isinstance(job, Begin):
            return [self._begun(job, outcome, room)] if room else []
        hop = room.hops.get(job.layers) if room else None
        if hop is None:
            return []
        effects: list[Effect]
        match outcome:
            case Ran():
                effects = hop.computed(job.ticket, outcome, now)
            case Rows():
                effects = hop.log_read(job.ticket, outcome.rows)
            case Missing() if isinstance(job, Compute):
                effects = hop.needs(job.ticket, outcome.have, now)
            case Failed() if isinstance(job, Compute):
                effects = hop.failed(job.ticket, outcome.why, outcome.detail, now)
            case Missing():
                effects = hop.log_missing(job.ticket, outcome.have, now)
            case Failed():
                effects = hop.log_failed(job.ticket, outcome.why, outcome.detail)
        return effects

    def unreachable(self, session: SessionId, node: NodeId, why: Why, attempt: int | None = None) -> list[Effect]:
        """``session`` cannot reach ``node`` from here."""
        room = self._rooms.get(session)
        if room is None:
            return []
        return [effect for hop in room.hops.values() for effect in hop.unreachable(node, why, attempt)]

    def entry_gone(self, entry: NodeId, now: float) -> None:
        """The link to ``entry`` ended: its sessions have 30 s to be heard of again."""
        for room in self._rooms.values():
            if room.entry == entry:
                room.forget_at = min(room.forget_at, now + ORPHAN_S)
                room.orphaned = True

    def tick(self, now: float) -> list[Effect]:
        """Forget what is silent; repeat what was not answered."""
        effects: list[Effect] = []
        for session, room in list(self._rooms.items()):
            if now >= room.forget_at:
                del self._rooms[session]
                effects.append(Forget(session))
                continue
            for hop in room.hops.values():
                effects += hop.tick(now)
        return effects

    def deadline(self) -> float:
        """When `tick` next has something to do."""
        return min(
            (min([room.forget_at, *(hop.deadline() for hop in room.hops.values())]) for room in self._rooms.values()),
            default=math.inf,
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open(self, ask: Open, source: NodeId, now: float) -> list[Effect]:
        """What is kept of the prompt, if this node would run the session at all."""
        if ask.attempt <= self._ended.get(ask.session, -1):
            return []
        if self._refusal(ask.hop, ask.digest, ask.session) is not None:
            return [Send(source, Opened(ask.session, ask.attempt, ask.hop.layers, 0))]
        room = self._rooms.setdefault(ask.session, _Room(source, now + SILENCE_S))
        layers = ask.hop.layers
        if room.entry != source or layers in room.hops:
            return []
        opening = Opening(ask.session, layers, ask.tenant, ask.ids, ask.reserve_tokens)
        return [Begin(ask.session, layers, ask.attempt, opening)]

    def _begun(self, job: Begin, outcome: Outcome, room: _Room) -> Send:
        have = outcome.have if isinstance(outcome, Kept) else 0
        if job.layers not in room.hops:
            room.begun[job.layers] = have
        return Send(room.entry, Opened(job.session, job.attempt, job.layers, have))

    def _step(self, step: Step, source: NodeId, now: float) -> list[Effect]:
        if step.attempt <= self._ended.get(step.session, -1):
            return []
        refusal = self._refusal(step.plan.route[0], step.plan.digest, step.session)
        if refusal is None and (step.plan.origin.end if step.plan.origin else 0) != step.layers.start:
            refusal = Why.STALE, f"layers {step.layers} do not follow {step.plan.origin}"
        if refusal is not None:
            why, detail = refusal
            lost = Lost(step.session, step.attempt, self.self_id, step.layers, why, detail)
            return [Send(step.plan.entry, lost, source)]
        room = self._rooms.get(step.session)
        if room is None:
            room = self._rooms[step.session] = _Room(step.plan.entry, now + SILENCE_S)
        if room.entry != step.plan.entry:
            return []
        hop = room.hops.get(step.layers)
        if hop is None:
            hop = room.hops[step.layers] = HopSession(self.self_id, step, source, self._tickets)
            hop.begun(room.begun.pop(step.layers, 0))
        hop.windows = self.held is not None and self.held.windows
        return hop.step(step, source, now)

    def _refusal(self, hop: Hop, digest: str, session: SessionId) -> tuple[Why, str] | None:
        """Why this node cannot be ``hop`` of ``session``."""
        held = self.held
        why, detail = Why.STALE, ""
        if held is None:
            detail = "this node holds no layers"
        elif hop.node_id != self.self_id:
            detail = f"this node is {self.self_id[:8]}, not {hop.node_id[:8]}"
        elif held.digest != digest:
            detail = f"this node serves {held.digest[:16]}, not {digest[:16]}"
        elif not held.layers.covers(hop.layers):
            detail = f"this node holds {held.layers}, not {hop.layers}"
        elif held.generation != hop.generation:
            detail = f"this node's engine is number {held.generation}, not {hop.generation}"
        elif session not in self._rooms and len(self._rooms) >= self._max_sessions:
            why, detail = Why.FULL, f"{self._max_sessions} sessions run here"
        elif session not in self._rooms and self.computing >= self._max_computing:
            why, detail = Why.FULL, f"{self.computing} steps wait for this engine"
        return (why, detail) if detail else None

    def _answer(self, ask: Ask, room: _Room | None, source: NodeId) -> Iterator[Effect]:
        if room is None:  # unknown here: the whole of the model stands for "none of my ranges"
            layers = self.held.layers if self.held else LayerRange(0, 1)
            yield Send(source, Progress(ask.session, ask.attempt, ask.seq, layers, Phase.UNSEEN, 0))
            return
        for hop in room.hops.values():
            yield Send(source, hop.progress(ask.attempt, ask.seq))

    def _end(self, end: End) -> list[Effect]:
        self._ended[end.session] = max(end.attempt, self._ended.get(end.session, -1))
        self._ended.move_to_end(end.session)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        room = self._rooms.get(end.session)
        if room is None:
            return []
        room.hops = {layers: hop for layers, hop in room.hops.items() if hop.attempt > end.attempt}
        if room.hops:
            return []
        del self._rooms[end.session]
        return [Forget(end.session)]
