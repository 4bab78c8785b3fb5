"""One hop of one session: what a node does for the range ``layers`` of a session that an entry elsewhere owns. Pure.

Owns the order of work (one computation at a time, steps in order), what is missing and who was asked for it, and the newest
attempt. It must not know routes beyond its own next, tokens' meaning, clocks or sockets; it never changes a route and never
gives up on a session by itself: a hop that cannot go on tells the entry (`Lost`) and does nothing else.

Invariants:

* a step whose (attempt, seq) is not greater than the last one's is ignored; a step of a later attempt supersedes everything
  that waits here, because the entry sends again whatever it still wants;
* a step that starts after this hop's end waits at the head of the queue while its sender is asked (`Need`) for the rows before
  it; steps behind it wait too, so a prompt's chunks that were already under way are not sent twice;
* a `Need` from downstream is answered from the boundary log and needs no memory of what was sent: it may speak of any attempt,
  which is what lets a newcomer be filled while the old route runs. A log that is too short is filled the same way from
  upstream, and so on up to the entry's ids;
* ``have`` never promises more than one eviction less than the truth: the engine's NeedRows corrects it. Rows of drafts that a
  step does not confirm are not counted on (`holding`).

Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from meshd.chain.effects import Compute, ReadLog, Send
from meshd.chain.effects import HopEffect as Effect
from meshd.chain.holding import Holding
from meshd.chain.messages import Fill, Lost, Need, Phase, Progress, Reply, Step, Trace, Why
from meshd.inference.engine import Ran, Run
from meshd.vocabulary import LayerRange, NodeId

MAX_QUEUE: Final = 64  # steps that wait at one hop
MAX_OWED: Final = 8  # needs from downstream that wait for a fill from upstream
FILL_ROWS: Final = 256  # rows in one Fill
NEED_ROWS: Final = 16 * FILL_ROWS  # in one Need: what answers it is sent at once, and must have room where it waits
NEED_AGAIN_S: Final = 1.0  # an unanswered Need is repeated, each time after twice as long


@dataclass(frozen=True, slots=True)
class _Queued:
    step: Step
    source: NodeId
    arrived: float
    expires: float


@dataclass(slots=True)
class _Want:
    """Rows wanted from upstream: the next fill must start at ``next``, those before ``asked`` were asked for. ``since``: when one
    came, at first when it was asked for."""

    key: tuple[int, int]
    source: NodeId
    origin: LayerRange | None
    next: int
    asked: int
    upto: int
    since: float
    again_at: float
    wait_s: float = NEED_AGAIN_S


class HopSession:
    """State and rules of one (session, layers)."""

    def __init__(self, self_id: NodeId, step: Step, source: NodeId, tickets: Iterator[int]) -> None:
        """``tickets`` gives no number twice at this node: an answer to the hop that a session had before is none to this."""
        self.session = step.session
        self.layers = step.layers
        self.entry = step.plan.entry
        self.upstream = source  # who a reply goes back through
        self.attempt = -1
        self.windows = False  # what to tell the entry of this node's arithmetic
        self._self = self_id
        self._holding = Holding()
        self._origin = step.plan.origin
        self._next: NodeId | None = None
        self._last = (-1, -1)
        self._latest = step
        self._queue: deque[_Queued] = deque()
        self._fills: deque[Fill] = deque()
        self._running: tuple[int, _Queued | Fill] | None = None
        self._want: _Want | None = None
        self._owed: list[tuple[Need, NodeId]] = []
        self._reads: dict[int, tuple[Need, NodeId]] = {}
        self._tickets = tickets
        self._filled = 0
        self._told: tuple[int, NodeId] | None = None

    @property
    def have(self) -> int:
        """How many positions this hop's engine holds, guesses included."""
        return self._holding.have

    # --- messages -----------------------------------------------------------------------------------------------------

    def step(self, step: Step, source: NodeId, now: float) -> list[Effect]:
        """Rows to run, or (n = 0) a request to be ready for them."""
        key = step.key
        if key <= self._last or any(item.step.key == key for item in self._queue):
            return []
        item = _Queued(step, source, now, now + step.remaining_ms / 1000.0)
        if step.n == 0:
            if self._holding.reaches(step):
                return self._pass_on(item, Ran(), now)
        else:
            if step.attempt > self.attempt:
                self._supersede(step.attempt)
            self._last = key
            self._adopt(item)
        if len(self._queue) >= MAX_QUEUE:
            return [self._lost(step.attempt, Why.FULL, "too many steps wait at this hop")]
        self._queue.append(item)
        return self._go(now)

    def begun(self, have: int) -> None:
        """The engine began this session with ``have`` final positions of its prompt, before any step."""
        self._holding.filled(have)

    def fill(self, fill: Fill, now: float) -> list[Effect]:
        """Rows that were asked for; anything else is a leftover and ignored."""
        want = self._want
        if want is None or (fill.attempt, fill.seq) != want.key or fill.start != want.next:
            return []
        want.next = fill.end
        # A slow wire is not to carry the rest again each time.
        want.wait_s = max(NEED_AGAIN_S, 2.0 * (now - want.since))
        want.since, want.again_at = now, now + want.wait_s
        self._fills.append(fill)
        more = self._ask_upstream(want, now) if want.asked <= want.next < want.upto else []
        return [*more, *self._go(now)]

    def need(self, need: Need, source: NodeId) -> list[Effect]:
        """The next hop lacks rows that this one sent or can make again."""
        return [self._read(need, source)]

    def progress(self, attempt: int, seq: int) -> Progress:
        """Where that step is."""
        key = (attempt, seq)
        running = self._running[1] if self._running else None
        if isinstance(running, _Queued) and running.step.key == key:
            phase = Phase.COMPUTING
        elif self._queue and self._queue[0].step.key == key:
            phase = Phase.COMPUTING if running or self._fills else Phase.NEEDING if self._want else Phase.QUEUED
        elif any(item.step.key == key for item in self._queue):
            phase = Phase.QUEUED
        else:
            phase = Phase.SENT if key <= self._last else Phase.UNSEEN
        return Progress(self.session, attempt, seq, self.layers, phase, self.have)

    # --- the engine's answers -----------------------------------------------------------------------------------------

    def computed(self, ticket: int, ran: Ran, now: float) -> list[Effect]:
        """The run of ``ticket`` is done."""
        item = self._finished(ticket)
        if item is None:
            return []
        if isinstance(item, Fill):
            self._holding.filled(item.end)
            self._filled += item.n
            if self._want and self.have >= self._want.upto:
                self._want = None
            return [*self._settle_owed(now), *self._go(now)]
        self._holding.ran(item.step)
        effects: list[Effect] = []
        if self._queue and self._queue[0] is item:  # else: superseded while it ran
            self._queue.popleft()
            effects = self._pass_on(item, ran, now)
        return [*effects, *self._settle_owed(now), *self._go(now)]

    def needs(self, ticket: int, have: int, now: float) -> list[Effect]:
        """The engine's state ended before the run's start."""
        item = self._finished(ticket)
        if item is None:
            return []
        self._holding.lost(have)
        if isinstance(item, Fill):
            self._fills.clear()
            if self._want:
                self._want.next = have
                return self._ask_upstream(self._want, now)
        return [*self._settle_owed(now), *self._go(now)]

    def failed(self, ticket: int, why: Why, detail: str, now: float) -> list[Effect]:
        """The engine refused or died: this hop is lost to the session's current attempt. ``ROWS``: the hop before it is, which
        sent what no engine takes; what the entry itself sent is its own affair."""
        item = self._finished(ticket)
        if item is None:
            return []
        sender = self._sender(item)
        if why is Why.ROWS and sender is None:
            why = Why.ENGINE
        if why is Why.ENGINE:
            self._holding.lost(0)
        attempt = item.attempt if isinstance(item, Fill) else item.step.attempt
        if attempt < self.attempt:
            return self._go(now)
        self._queue.clear()
        self._fills.clear()
        self._owed.clear()
        self._want = None
        if why is Why.ROWS and sender is not None:
            return [Send(self.entry, Lost(self.session, attempt, *sender, why, detail), self.upstream)]
        return [self._lost(attempt, why, detail)]

    def log_read(self, ticket: int, rows: bytes) -> list[Effect]:
        """The log had the rows: they travel as fills."""
        asked = self._reads.pop(ticket, None)
        if asked is None:
            return []
        need, source = asked
        size = len(rows) // (need.upto - need.have)
        return [
            Send(source, Fill(need.session, need.attempt, need.seq, need.layers, start, n, rows[a : a + n * size]))
            for start in range(need.have, need.upto, FILL_ROWS)
            for n in [min(FILL_ROWS, need.upto - start)]
            for a in [(start - need.have) * size]
        ]

    def log_missing(self, ticket: int, have: int, now: float) -> list[Effect]:
        """The log ended at ``have`` (evicted): fill it from upstream, then answer."""
        asked = self._reads.pop(ticket, None)
        if asked is None:
            return []
        need, source = asked
        if len(self._owed) < MAX_OWED:
            self._owed.append((need, source))
        if self._running:
            return []  # its outcome says where the log really ends
        self._holding.lost(have)
        return self._settle_owed(now)

    def log_failed(self, ticket: int, why: Why, detail: str) -> list[Effect]:
        """The log cannot be read. That says nothing of what is held, and filling it anew would end here again and again:
        the attempt that wants the rows has to do without this hop."""
        asked = self._reads.pop(ticket, None)
        return [] if asked is None else [self._lost(asked[0].attempt, why, detail)]

    # --- the world ----------------------------------------------------------------------------------------------------

    def unreachable(self, node: NodeId, why: Why, attempt: int | None = None) -> list[Effect]:
        """The link to ``node`` broke or could not be made (``attempt``: while a step of that attempt was being sent)."""
        mark = self.attempt if attempt is None else attempt
        if node != self._next or mark < self.attempt or self._told == (mark, node):
            return []
        self._told = (mark, node)
        route = self._latest.plan.route
        lost = route[1] if len(route) > 1 else None
        if lost is None or lost.node_id != node:
            return []
        return [Send(self.entry, Lost(self.session, mark, node, lost.layers, why), self.upstream)]

    def tick(self, now: float) -> list[Effect]:
        """Repeat a Need that nobody answered."""
        want = self._want
        if want is None or now < want.again_at:
            return []
        if self._fills or self._running:
            want.again_at = now + want.wait_s
            return []
        want.wait_s *= 2
        want.next = self.have
        return self._ask_upstream(want, now)

    def deadline(self) -> float:
        """When `tick` next has something to do."""
        return self._want.again_at if self._want else math.inf

    # --- inside -------------------------------------------------------------------------------------------------------

    def _supersede(self, attempt: int) -> None:
        self.attempt = attempt
        self._queue.clear()
        self._fills.clear()
        self._owed.clear()
        self._want = None
        self._filled = 0

    def _adopt(self, item: _Queued) -> None:
        """A real step says where this hop's rows come from and go to."""
        self._latest = item.step
        self.upstream = item.source
        self._origin = item.step.plan.origin
        route = item.step.plan.route
        self._next = route[1].node_id if len(route) > 1 else None

    def _go(self, now: float) -> list[Effect]:
        """Start whatever can run."""
        if self._running:
            return []
        if self._fills:
            return [self._compute_fill(self._fills.popleft())]
        effects: list[Effect] = []
        while self._queue:
            item = self._queue[0]
            if now >= item.expires:
                self._queue.popleft()
                if self._want and self._want.key == item.step.key:
                    self._want = None
            elif not self._holding.reaches(item.step):
                if self._want is None:
                    effects += self._want_rows(item.step.key, item.source, item.step.plan.origin, item.step.start, now)
                break
            elif item.step.n == 0:
                self._queue.popleft()
                effects += self._pass_on(item, Ran(), now)
            else:
                effects.append(self._compute_step(item))
                break
        return effects

    def _compute_step(self, item: _Queued) -> Compute:
        step, plan = item.step, item.step.plan
        last = step.layers.end == plan.num_layers
        run = Run(
            session=plan.session,
            layers=step.layers,
            start=step.start,
            n=step.n,
            emit=step.emit if last else step.n,
            prompt_len=plan.prompt_len,
            rows=step.rows,
            reserve_tokens=step.reserve_tokens,
            sampling=plan.sampling if last else None,
            history=step.history if last else (),
        )
        return self._start(item, run)

    def _compute_fill(self, fill: Fill) -> Compute:
        shape = self._queue[0].step if self._queue else self._latest
        run = Run(
            session=fill.session,
            layers=fill.layers,
            start=fill.start,
            n=fill.n,
            emit=0,
            prompt_len=shape.plan.prompt_len,
            rows=fill.rows,
            reserve_tokens=shape.reserve_tokens,
        )
        return self._start(fill, run)

    def _start(self, item: _Queued | Fill, run: Run) -> Compute:
        ticket = next(self._tickets)
        self._running = (ticket, item)
        return Compute(self.session, self.layers, ticket, run)

    def _finished(self, ticket: int) -> _Queued | Fill | None:
        if self._running is None or self._running[0] != ticket:
            return None
        item = self._running[1]
        self._running = None
        return item

    def _pass_on(self, item: _Queued, ran: Ran, now: float) -> list[Effect]:
        """To the next hop, or from the exit to the entry."""
        step = item.step
        trail = (*step.trail, Trace(ran.compute_ms, (now - item.arrived) * 1000.0, self._filled, self.windows))
        self._filled = 0
        if len(step.plan.route) == 1:
            reply = Reply(
                step.session,
                step.attempt,
                step.seq,
                step.end,
                ran.choices,
                trail,
                prepared=step.n == 0,
                guess=step.guess,
            )
            return [Send(self.entry, reply, item.source)]
        onward = replace(
            step,
            plan=step.plan.onward,
            remaining_ms=max(0, int((item.expires - now) * 1000.0)),
            trail=trail,
            rows=ran.rows,
        )
        return [Send(step.plan.route[1].node_id, onward)]

    def _sender(self, item: _Queued | Fill) -> tuple[NodeId, LayerRange] | None:
        """The hop whose rows ``item`` holds; None where they are the entry's."""
        if isinstance(item, Fill):
            source, origin = (self._want.source, self._want.origin) if self._want else (self.upstream, self._origin)
        else:
            source, origin = item.source, item.step.plan.origin
        return None if origin is None else (source, origin)

    def _lost(self, attempt: int, why: Why, detail: str) -> Send:
        return Send(self.entry, Lost(self.session, attempt, self._self, self.layers, why, detail), self.upstream)

    def _want_rows(
        self, key: tuple[int, int], source: NodeId, origin: LayerRange | None, upto: int, now: float
    ) -> list[Effect]:
        self._want = _Want(key, source, origin, self.have, self.have, upto, now, now + NEED_AGAIN_S)
        return self._ask_upstream(self._want, now)

    def _ask_upstream(self, want: _Want, now: float) -> list[Effect]:
        want.again_at = now + want.wait_s
        if want.next >= want.upto:  # can only be when an old promise came true meanwhile
            self._want = None
            return self._go(now)
        want.asked = min(want.upto, want.next + NEED_ROWS)
        return [Send(want.source, Need(self.session, *want.key, self.layers, want.origin, want.next, want.asked))]

    def _read(self, need: Need, source: NodeId) -> ReadLog:
        ticket = next(self._tickets)
        self._reads[ticket] = (need, source)
        return ReadLog(self.session, self.layers, ticket, need.have, need.upto)

    def _settle_owed(self, now: float) -> list[Effect]:
        """Answer the needs that can be answered now; ask upstream for the rest."""
        if not self._owed:
            return []
        effects: list[Effect] = []
        for need, source in self._owed:
            if need.upto <= self.have:
                effects.append(self._read(need, source))
        self._owed = [(need, source) for need, source in self._owed if need.upto > self.have]
        if self._owed and self._want is None:
            need = self._owed[0][0]
            self._holding.lost(self._holding.sure)  # what comes must not rest on guesses
            effects += self._want_rows((need.attempt, need.seq), self.upstream, self._origin, need.upto, now)
        return effects
