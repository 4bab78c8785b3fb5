"""The entry's side of one request: it owns the ids, the position, the route and every decision to change it. Pure.

Feed it messages and evidence, carry out the effects, call `tick` when `deadline` has come. It must not know sockets, clocks,
text or how routes are found (`recovery.Replicas`).

Invariants:

* the first reply for a position is taken, whichever attempt it came through; no hop's state depends on a token before this
  sends it on (drafts are marked as such), so late and doubled messages cannot do harm;
* attempt numbers only grow; a route that won after another was started goes on under a new number;
* slow is not dead: without progress for max(0.6 s, 8 x what was expected) another route is tried *beside* the one that runs,
  at most two of them and never twice the same node for one token; a node is dead after 1.5 s of silence, a broken link or a
  refusal at once. A node that leaves PINGs unanswered is hedged after 0.6 s whatever was expected;
* a hop speaks of the latest attempt that reached it: an earlier one that is fallen back on, and of which a hop is not to be
  reached from here, is sent anew, or nobody would ever say that it is lost;
* progress is a reply, or a change in what a hop answers to `Ask` (a long replay is not a stall);
* a pause of this process itself is nobody's silence;
* drafts ride behind the last token of a plain step and count as sent nowhere; what they are worth is `Stepper.take`'s to say;
* it ends with exactly one of Finish and Fail, and every node that was ever sent to is told `End`.

Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from meshd.chain.attempts import CHUNK_ROWS, WINDOW_ROWS, Attempt, Stepper
from meshd.chain.detours import Detours
from meshd.chain.drafts import MAX_DRAFTS, Drafts
from meshd.chain.effects import Emit, Fail, Failover, Finish, Recovered, Send, Watch
from meshd.chain.effects import SessionEffect as Effect
from meshd.chain.evidence import Pulse
from meshd.chain.messages import Ask, ChainMessage, End, Lost, Need, Opened, Phase, Progress, Reply, Why
from meshd.chain.opening import ASKED_TOKENS, Opening
from meshd.chain.patience import HEDGE_S, Patience
from meshd.chain.recovery import Replicas, Swap, chained
from meshd.chain.report import Tally
from meshd.chain.request import GenerationRequest, HopReport, Recovery
from meshd.errors import Busy, DeadlineExceeded, MeshdError, StageUnavailable
from meshd.inference.engine import Choice
from meshd.vocabulary import Hop, LayerRange, NodeId, Route, SessionId

MAX_LIVE: Final = 3  # attempts under way at once
PENDING_S: Final = 1.0  # layers that are about to be proven are waited for
RETRY_S: Final = 0.05
PREPARE_S: Final = 10.0
PAUSED_S: Final = 0.5  # a tick that comes this late was held up by this process itself


@dataclass(slots=True)
class _Prepared:
    """A route that is being made ready because a hop of the running one drains."""

    number: int
    route: Route
    swaps: tuple[Swap, ...]
    until: float
    ready: bool = False


@dataclass(frozen=True, slots=True)
class _Stuck:
    """Nobody holds the layers, but somebody is about to."""

    bad: frozenset[NodeId]
    reason: str
    until: float
    again_at: float


class Session:
    """One request. Call `start` once, then anything."""

    def __init__(
        self,
        session: SessionId,
        self_id: NodeId,
        request: GenerationRequest,
        *,
        digest: str,
        num_layers: int,
        route: Route,
        replicas: Replicas,
        now: float,
        drafts: Drafts | None = None,
    ) -> None:
        self.session = session
        self.recoveries: list[Recovery] = []
        self.hedges = 0
        self.drafted = 0
        self.accepted = 0
        self.cached = 0  # positions that no hop of the first route had to compute
        self.over = False
        self._self = self_id
        self._request = request
        self._replicas = replicas
        # Penalties make every row's draw depend on the tokens before it, which a window's rows cannot know.
        self._drafts = None if request.sampling.needs_history else drafts
        self._stepper = Stepper(session, self_id, request, digest, num_layers)
        self._detours = Detours(self_id, replicas)
        self._pulse = Pulse(self_id)
        self._tally = Tally()
        self._tickets: dict[NodeId, int] = {}
        self._ticket = 0
        self._touched: dict[NodeId, None] = {}
        self._attempts: dict[int, Attempt] = {}
        self._number = 0
        self._current = Attempt(0, route, 0, now, dead=True)
        self._acked = 0
        self._resent = False
        self._refused: set[NodeId] = set()  # not to be reached from here: what is their neighbour's word?
        self._prepared: _Prepared | None = None
        self._prepare_at = now
        self._stuck: _Stuck | None = None
        self._opening: Opening | None = None
        self._warm: frozenset[tuple[NodeId, LayerRange]] = frozenset()
        self._expires = math.inf if request.deadline_s is None else now + request.deadline_s
        self._token_due = now + request.token_deadline_s
        self._began = now  # when the token that is waited for was first asked for
        self._patience = Patience(now)
        self._due = math.inf

    # --- what the shell calls -----------------------------------------------------------------------------------------

    @property
    def route(self) -> Route:
        """The route that runs now."""
        return self._current.route

    @property
    def nodes(self) -> frozenset[NodeId]:
        """Whoever any attempt that was not given up goes through."""
        return frozenset(node for attempt in self._attempts.values() if not attempt.dead for node in attempt.nodes)

    @property
    def ids(self) -> list[int]:
        """Prompt and answer so far."""
        return self._stepper.ids

    @property
    def attempts(self) -> int:
        """How many routes were tried."""
        return self._number

    def report(self) -> tuple[HopReport, ...]:
        """Means per hop of the route that runs."""
        hops = self._tally.report(self._current.route)
        return tuple(
            replace(hop, cached_tokens=self.cached) if (hop.node_id, hop.layers) in self._warm else hop for hop in hops
        )

    def start(self, now: float) -> list[Effect]:
        """Send the first steps."""
        if self._stepper.finished:
            return self._done(self._stepper.finished)
        route = self._current.route
        self._patience.row_s = self._replicas.expected_s(route, 64) / 64.0
        self._patience.step_s = self._replicas.expected_s(route, 1)
        if self._stepper.prompt_len < ASKED_TOKENS or not self._request.sticky:
            return self._begin(route, (), now)
        return self._open(route, now)

    def receive(self, message: ChainMessage, source: NodeId, now: float) -> list[Effect]:
        """A message from a hop."""
        if self.over:
            return []
        self._pulse.heard(source, now)
        match message:
            case Reply():
                effects = self._reply(message, now)
            case Need():
                effects = self._fill(message, source)
            case Lost():
                effects = self._lost(message, source, now)
            case Opened():
                effects = self._opened(message, source, now)
            case Progress():
                effects = self._progressed(message, source, now)
            case _:
                effects = []
        return effects

    def unreachable(self, node: NodeId, why: Why, now: float, *, ticket: int = 0, attempt: int = 0) -> list[Effect]:
        """The link to ``node`` broke or could not be made: a watch (``ticket``) or a step (``attempt``) says so."""
        if self.over or (ticket and self._tickets.get(node) != ticket):
            return []
        if attempt and (attempt not in self._attempts or self._attempts[attempt].dead):
            return []
        if why is Why.REFUSED and node != self.route[0].node_id:
            # Perhaps only this node cannot reach it: its neighbour will say. Try another beside it meanwhile.
            self._refused.add(node)
            return self._hedge({node} & self._current.nodes, "reset", now)
        return self._lose({node}, why, self._self, now)

    def heard(self, node: NodeId, at: float) -> None:
        """The link to ``node`` carried something at ``at``."""
        self._pulse.heard(node, at)

    def stop(self) -> list[Effect]:
        """The client has what it wants (a stop string): finish as an end token would."""
        return [] if self.over else self._done("stop")

    def cancel(self) -> list[Effect]:
        """The client left."""
        if self.over:
            return []
        self.over = True
        return list(self._ends(self._touched))

    def tick(self, now: float) -> list[Effect]:
        """What time alone decides."""
        if self.over:
            return []
        if now >= self._due + PAUSED_S:
            self._pulse.excuse(now)
            self._progress(now)
        if now >= self._expires or now >= self._token_due:
            return self._fail(DeadlineExceeded(self._lateness(now)))
        if self._stuck:
            return self._retry(self._stuck, now)
        dead = {node for node in self._live_nodes() if now >= self._pulse.dead_at(node)}
        if dead:
            return self._lose(dead, Why.SILENT, self._self, now)
        if self._opening and now >= self._opening.until:
            return self._begin_warm(self._opening, now)
        effects: list[Effect] = []
        if now >= self._patience.ask_at:
            effects += self._ask(now)
            quiet = {node for node in self._current.nodes if self._pulse.quiet(node, now)}
            if quiet and now >= self._patience.progress_at + HEDGE_S:
                effects += self._hedge(quiet, "silent", now)
        if now >= self._patience.hedge_at:
            effects += self._suspect(now)
        return effects

    def deadline(self) -> float:
        """When `tick` next has something to do. Ask just before waiting: a tick much later than this means a pause."""
        self._due = math.inf if self.over else self.due()
        return self._due

    def due(self) -> float:
        """As `deadline`, for who does not wait: whether a wait that began earlier has become too long."""
        due = min(self._expires, self._token_due)
        if self._stuck:
            return min(due, self._stuck.again_at)
        silent = min((self._pulse.dead_at(node) for node in self._live_nodes()), default=math.inf)
        opening = self._opening.until if self._opening else math.inf
        return min(due, silent, opening, self._patience.ask_at, self._patience.hedge_at)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _reply(self, reply: Reply, now: float) -> list[Effect]:
        if reply.prepared:
            if self._prepared and self._prepared.number == reply.attempt:
                self._prepared.ready = True
            return []
        attempt = self._attempts.get(reply.attempt)
        if reply.end - len(reply.guess) > len(self.ids):
            return []  # nobody can have computed what was not sent
        if attempt is None and not any(choice.position == len(self.ids) for choice in reply.choices):
            return []
        taken = self._stepper.take(reply)
        confirmed = self._stepper.confirmed(reply)
        if confirmed > self._acked:
            self._acked = confirmed
            self._progress(now)
        for one in self._attempts.values():
            one.acknowledge(self._acked)
        if attempt is not None:
            attempt.sent = max(attempt.sent, confirmed)
        if not taken:
            return self._pump(now)
        return self._take(taken, attempt, reply, now)

    def _fill(self, need: Need, source: NodeId) -> list[Effect]:
        """Hop 0 lacks ids."""
        if need.origin is not None or need.upto > len(self.ids):
            return []
        return [Send(source, fill) for fill in self._stepper.fill(need)]

    def _lost(self, lost: Lost, source: NodeId, now: float) -> list[Effect]:
        attempt = self._attempts.get(lost.attempt)
        if (
            attempt is None
            or attempt.dead
            or Hop(lost.node, lost.layers) not in {Hop(hop.node_id, hop.layers) for hop in attempt.route}
        ):
            return []
        return self._lose({lost.node}, lost.why, source, now)

    def _progressed(self, progress: Progress, source: NodeId, now: float) -> list[Effect]:
        attempt = self._attempts.get(progress.attempt)
        if attempt is None or progress.seq != attempt.oldest():
            return []
        place = (source, progress.layers)
        report = (progress.phase, progress.have)
        before = attempt.reports.get(place)
        attempt.reports[place] = report
        if before is not None and before != report and not attempt.dead:
            self._progress(now)
        return []

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _take(self, taken: list[Choice], attempt: Attempt | None, reply: Reply, now: float) -> list[Effect]:
        self.accepted += min(len(taken) - 1, len(reply.guess))
        effects: list[Effect] = [Emit(tuple(taken))]
        self._token_due = now + self._request.token_deadline_s
        if attempt is not None and not attempt.dead:
            effects += self._adopt(attempt, reply, len(taken), now)
        if self._stepper.finished:
            return effects + self._done(self._stepper.finished)
        self._began = now
        self._detours.next_token()
        self._resent = False
        self._refused.clear()
        self._patience.token()
        self._progress(now)
        return effects + self._onward(now)

    def _adopt(self, winner: Attempt, reply: Reply, tokens: int, now: float) -> list[Effect]:
        """The token came through ``winner``: it is the route from now on."""
        self._learn(winner, reply, tokens, now)
        effects: list[Effect] = [Recovered(self._recovery(swap, winner, reply, now)) for swap in winner.swaps]
        self.recoveries += [effect.recovery for effect in effects if isinstance(effect, Recovered)]
        for swap in winner.swaps:
            if swap.reason in ("slow", "silent"):
                self._replicas.penalise(swap.source, reporter=self._self, now=now)
        losers = {node for one in self._attempts.values() for node in one.nodes} - winner.nodes
        losers -= {hop.node_id for hop in self._prepared.route} if self._prepared else set()
        effects += self._ends(sorted(losers))
        if winner.number < max(self._attempts):  # hops that have seen a later one take no step of this any more
            self._number += 1
            winner = Attempt(self._number, winner.route, len(self.ids) - 1, now, windows=winner.windows)
        winner.swaps = ()
        winner.replayed = 0
        self._current = winner
        self._attempts = {winner.number: winner}
        self._stuck = None
        self._detours.came_through(winner.nodes)
        return effects

    def _recovery(self, swap: Swap, winner: Attempt, reply: Reply, now: float) -> Recovery:
        filled = 0
        for hop, trace in zip(winner.route, reply.trail, strict=False):
            if hop.node_id == swap.to and hop.layers.start <= swap.layers.start < hop.layers.end:
                filled = trace.filled
        stall_ms = (now - self._began) * 1000.0
        return Recovery(swap.layers, swap.source, swap.to, swap.reason, stall_ms, filled, swap.exact)

    def _learn(self, winner: Attempt, reply: Reply, tokens: int, now: float) -> None:
        """What a step costs, for the next judgement of slowness and of drafts."""
        elapsed = now - winner.began
        self._tally.add(winner.route, reply.trail, elapsed * 1000.0, tokens)
        winner.windows = len(reply.trail) == len(winner.route) and all(trace.windows for trace in reply.trail)
        if self._acked <= self._stepper.prompt_len + len(self._request.forced):  # the prompt's own pass
            self._patience.learn_prompt(elapsed, self._acked - self.cached)
        elif not winner.replayed and not winner.swaps:
            self._patience.learn_step(elapsed)
            if self._drafts is not None:
                self._drafts.learn(len(reply.guess), elapsed, sum(trace.compute_ms for trace in reply.trail) / 1000.0)

    def _done(self, reason: str) -> list[Effect]:
        self.over = True
        return [Finish(reason), *self._ends(self._touched)]

    def _fail(self, error: MeshdError) -> list[Effect]:
        self.over = True
        return [Fail(error), *self._ends(self._touched)]

    def _ends(self, nodes: Iterable[NodeId]) -> list[Effect]:
        nodes = list(nodes)
        for node in nodes:
            self._touched.pop(node, None)
            self._pulse.drop(node)
            self._tickets.pop(node, None)
        return [Send(node, End(self.session, self._number)) for node in nodes]

    # --- steps --------------------------------------------------------------------------------------------------------

    def _open(self, route: Route, now: float) -> list[Effect]:
        """Ask every hop at once what it keeps of the prompt: what all of them have is neither sent nor computed."""
        self._number += 1
        self._opening = Opening(route, now)
        self._progress(now)
        asks = [Send(hop.node_id, self._stepper.open(self._number, hop, self._request.tenant)) for hop in route]
        return [*self._watch(route, now), *asks]

    def _opened(self, opened: Opened, source: NodeId, now: float) -> list[Effect]:
        kept_tokens = min(opened.have, self._stepper.prompt_len - 1)
        if self._opening is None or not self._opening.heard((source, opened.layers), kept_tokens):
            return []
        return self._begin_warm(self._opening, now)

    def _begin_warm(self, opening: Opening, now: float) -> list[Effect]:
        """What every hop has counts as computed; a newcomer that has less is filled as always."""
        self.cached = self._acked = opening.cached_tokens
        self._warm = frozenset(opening.places)
        return self._begin(self._current.route, (), now)

    def _begin(self, route: Route, swaps: tuple[Swap, ...], now: float, *, replayed: int = 0) -> list[Effect]:
        """Start an attempt from what the exit has acknowledged."""
        self._opening = None
        self._number += 1
        self._current = Attempt(self._number, route, self._acked, now, swaps, replayed)
        self._attempts[self._number] = self._current
        self._progress(now)
        return [*self._watch(route, now), *self._pump(now)]

    def _watch(self, route: Route, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for hop in route:
            self._touched[hop.node_id] = None
            if self._pulse.watch(hop.node_id, now, direct=hop is route[0]):
                self._ticket += 1
                self._tickets[hop.node_id] = self._ticket
                effects.append(Watch(hop.node_id, self._ticket))
        return effects

    def _pump(self, now: float) -> list[Effect]:
        """Send what may be sent over the current route."""
        attempt, effects = self._current, list[Effect]()
        if attempt.dead:
            return effects
        while attempt.sent < len(self.ids) and attempt.sent < self._acked + WINDOW_ROWS:
            n = min(CHUNK_ROWS - attempt.sent % CHUNK_ROWS, len(self.ids) - attempt.sent)
            guess = self._guess(attempt)
            step = self._stepper.step(
                attempt.number, attempt.route, attempt.sent, n, self._remaining_s(now), guess=guess
            )
            attempt.sent += n
            attempt.unacked.append((step.seq, attempt.sent))
            effects.append(Send(attempt.route[0].node_id, step))
        return effects

    def _guess(self, attempt: Attempt) -> tuple[int, ...]:
        """Drafts for a plain step over hops that have said that they can."""
        plain = attempt.sent == len(self.ids) - 1 and attempt.sent >= self._stepper.prompt_len
        if self._drafts is None or not plain or not attempt.windows:
            return ()
        guess = self._drafts.propose(self.ids, min(MAX_DRAFTS, self._stepper.left - 1))
        self.drafted += len(guess)
        return guess

    def _onward(self, now: float) -> list[Effect]:
        """The next token: over the prepared route if that is ready."""
        prepared = self._prepared
        if prepared and (now >= prepared.until or prepared.ready):
            self._prepared = None
            self._prepare_at = now + 1.0
            if prepared.ready:
                return self._begin(prepared.route, prepared.swaps, now)
        self._current.began = now
        effects = self._pump(now)
        draining = {node for node in self._current.nodes if self._replicas.draining(node)}
        if draining and self._prepared is None and now >= self._prepare_at and not self._current.dead:
            effects += self._prepare(draining, now)
        return effects

    def _prepare(self, draining: set[NodeId], now: float) -> list[Effect]:
        """Have newcomers filled while the old route runs."""
        self._prepare_at = now + 1.0
        found = self._detours.before(self.route, draining, now)
        if found is None:
            return []
        self._number += 1
        self._prepared = _Prepared(self._number, found.route, found.swaps, now + PREPARE_S)
        step = self._stepper.step(self._number, found.route, self._acked, 0, PREPARE_S)
        return [*self._watch(found.route, now), Send(found.route[0].node_id, step)]

    # --- trouble ------------------------------------------------------------------------------------------------------

    def _lose(self, nodes: set[NodeId], why: Why, reporter: NodeId, now: float) -> list[Effect]:
        """``nodes`` are out of every attempt that they were in."""
        self._opening = None
        for node in nodes:
            self._detours.lost(node, why, reporter, now)
            self._pulse.drop(node)
            self._tickets.pop(node, None)
        for attempt in self._attempts.values():
            attempt.dead = attempt.dead or bool(attempt.nodes & nodes)
        if self._prepared and nodes & {hop.node_id for hop in self._prepared.route}:
            self._prepared = None
        bad = frozenset(nodes & self._current.nodes)
        if self._stuck:
            self._stuck = replace(self._stuck, bad=self._stuck.bad | bad)
        if not self._current.dead or self._stuck:
            return []
        return self._replace(bad, _REASONS[why], reporter, now)

    def _replace(self, bad: frozenset[NodeId], reason: str, reporter: NodeId, now: float) -> list[Effect]:
        found = self._detours.around(self.route, bad, reason, reporter, now)
        if not found.missing:
            begun = self._begin(found.route, chained(self._current.swaps, found.swaps), now, replayed=self._acked)
            return [Failover(found.swaps, found.route, hedge=False), *begun]
        older = [attempt for attempt in self._attempts.values() if not attempt.dead]
        if older:  # a slow route still runs: better late than never
            self._current = older[-1]
            self._progress(now)
            # A hop that has taken up a later attempt says no more of this one: where a loss is likely it is asked anew.
            return self._again(now) if self._current.nodes & self._refused else []
        if any(self._replicas.pending(layers) for layers in found.missing):
            self._stuck = _Stuck(bad, reason, now + PENDING_S, now + RETRY_S)
            return []
        return self._fail(self._unavailable(found.missing, bad, now, pending=False))

    def _retry(self, stuck: _Stuck, now: float) -> list[Effect]:
        """Try again to find the layers that are about to be proven."""
        if now < stuck.again_at:
            return []
        found = self._detours.around(self.route, stuck.bad, stuck.reason, self._self, now)
        if not found.missing:
            self._stuck = None
            begun = self._begin(found.route, chained(self._current.swaps, found.swaps), now, replayed=self._acked)
            return [Failover(found.swaps, found.route, hedge=False), *begun]
        if now >= stuck.until:
            return self._fail(self._unavailable(found.missing, stuck.bad, now, pending=True))
        self._stuck = _Stuck(stuck.bad, stuck.reason, stuck.until, now + RETRY_S)
        return []

    def _unavailable(
        self, missing: tuple[LayerRange, ...], bad: frozenset[NodeId], now: float, *, pending: bool
    ) -> MeshdError:
        if self._detours.full(self.route, bad, now):
            return Busy(f"no room for another session at layers {', '.join(map(str, missing))}")
        return StageUnavailable(list(missing), pending=pending)

    def _ask(self, now: float) -> list[Effect]:
        self._patience.asked(now)
        return [
            Send(node, Ask(self.session, attempt.number, seq))
            for attempt in self._attempts.values()
            if not attempt.dead and (seq := attempt.oldest()) is not None
            for node in sorted(attempt.nodes)
        ]

    def _suspect(self, now: float) -> list[Effect]:
        """Nothing has moved for too long: who holds it up?"""
        self._patience.suspected(now, self._rows_ahead(), self._remaining_s(now))
        if self._current.dead:
            return []
        quiet = {node for node in self._current.nodes if self._pulse.quiet(node, now)}
        if quiet:
            return self._hedge(quiet, "silent", now)
        hop, before = self._current.held_up()
        if hop is None:
            return self._again(now)
        phase = self._current.phase(hop)
        if phase is Phase.NEEDING and self._patience.first:
            return []  # it repeats its Need by itself
        if phase in (Phase.UNSEEN, Phase.NEEDING):
            return self._bridge(before, hop, now)
        return self._hedge({hop.node_id}, "slow", now)

    def _bridge(self, before: Hop | None, hop: Hop, now: float) -> list[Effect]:
        """``hop`` waits for what the hop before it has sent: a message was lost once, or their link is broken."""
        if self._resent:
            around = self._hedge({hop.node_id}, "slow", now)
            if not around and before is not None:
                around = self._hedge({before.node_id}, "slow", now)
            if around:
                return around
        self._resent = True
        return self._again(now)

    def _again(self, now: float) -> list[Effect]:
        """A message was lost on the way: the same route, the same step, a new attempt."""
        old = self._current
        old.dead = True
        return self._begin(old.route, old.swaps, now, replayed=old.replayed)

    def _hedge(self, slow: set[NodeId], reason: str, now: float) -> list[Effect]:
        live = [attempt for attempt in self._attempts.values() if not attempt.dead]
        if self._current.dead or not slow or len(live) >= MAX_LIVE:
            return []
        found = self._detours.beside(self.route, slow, reason, now)
        if found is None:
            return []
        self.hedges += 1
        begun = self._begin(found.route, chained(self._current.swaps, found.swaps), now, replayed=self._acked)
        return [Failover(found.swaps, found.route, hedge=True), *begun]

    # --- time ---------------------------------------------------------------------------------------------------------

    def _progress(self, now: float) -> None:
        self._patience.progressed(now, self._rows_ahead(), self._remaining_s(now))

    def _rows_ahead(self) -> int:
        """Rows under way or to be replayed, beside the one of a plain step."""
        under_way = self._current.unacked[-1][1] - self._acked if self._current.unacked else 0
        return max(0, under_way - 1) + self._current.replayed

    def _live_nodes(self) -> set[NodeId]:
        return {node for attempt in self._attempts.values() if not attempt.dead for node in attempt.nodes}

    def _remaining_s(self, now: float) -> float:
        return min(self._expires, self._token_due) - now

    def _lateness(self, now: float) -> str:
        where = self._current.held_up()[0] or self.route[0]
        waiting = f"waiting for layers {where.layers} at node {where.node_id[:8]}"
        if now < self._expires:
            return f"no token for {now - self._began:.1f} s: {waiting}"
        told = len(self.ids) - self._stepper.prompt_len
        return f"the request's deadline came after {told} of {self._request.max_tokens} tokens: {waiting}"


_REASONS: Final = {
    Why.RESET: "reset",
    Why.REFUSED: "reset",
    Why.STALE: "reset",
    Why.ENGINE: "reset",
    Why.ROWS: "reset",
    Why.SILENT: "silent",
    Why.FULL: "full",
}
