"""The entry side of a node: runs requests. A trio shell around `session.Session`.

Owns the tasks of a request (its timer, its watched links) and the queue of events to its client. Implements
`chain.request.Chain`. Everything of a request lives in the service's nursery and not in the client's: a client that leaves
cancels its request, and an error reaches it as what it is and not wrapped in a group.

A request without a live route waits up to a second if the missing layers are about to be proven. ``stateless`` requests run
each token as a session of its own, so a token's loss costs a token's time and no hop keeps anything.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import trio

from meshd.chain.courier import Courier
from meshd.chain.drafts import Drafts
from meshd.chain.effects import Emit, Fail, Failover, Finish, Recovered, Send, SessionEffect, Watch
from meshd.chain.messages import ChainMessage, Lost, Why
from meshd.chain.replicas import DirectoryReplicas
from meshd.chain.request import Event, Finished, GenerationRequest, Recovery, RouteUse, Started, Timings, Tokens
from meshd.chain.session import PENDING_S, RETRY_S, Session
from meshd.directory import Directory
from meshd.errors import Busy, CallerError, ContextLengthExceeded, MeshdError, NotReady, StageUnavailable
from meshd.links.wire import Links
from meshd.routing.planner import PlannedRoute, Planner
from meshd.vocabulary import ModelSpec, NodeId, SessionId

log = logging.getLogger(__name__)

EVENT_SLACK: Final = 16  # events of a request beside its tokens
DEAF_S: Final = 0.75  # watched nodes answer a PING every 0.25 s
Notice = Callable[[str, dict[str, Any]], None]
NewDrafts = Callable[[GenerationRequest], Drafts | None]


@dataclass(frozen=True, slots=True)
class EntryParts:
    """What an entry is made of."""

    self_id: NodeId
    links: Links
    planner: Planner
    directory: Callable[[], Directory]
    model: Callable[[], ModelSpec | None]
    notice: Notice
    rng: random.Random
    max_sessions: int
    drafts: NewDrafts | None


class _Answer:
    """One request as its client sees it: an iterator of events."""

    def __init__(self, session: SessionId, request: GenerationRequest, spec: ModelSpec) -> None:
        self.session = session
        self.request = request
        self.spec = spec
        self.scope = trio.CancelScope()
        self.began = trio.current_time()
        self.token_times: list[float] = []
        self.recoveries: list[Recovery] = []
        self.stopped = False
        self.on_stop: Callable[[], None] = _nothing
        self._put, self._take = trio.open_memory_channel[Event | MeshdError](request.max_tokens + EVENT_SLACK)

    def started(self, planned: PlannedRoute) -> None:
        """The request has a route."""
        self.put(Started(self.session, planned.hops, RouteUse(planned.mode, planned.signature)))

    def stop(self) -> None:
        """`Stoppable`: no more tokens are wanted, the report is."""
        self.stopped = True
        self.on_stop()

    def put(self, event: Event | MeshdError) -> None:
        """Hand an event to the client. The queue has room for every token of the request."""
        self._put.send_nowait(event)

    def close(self) -> None:
        """No more events."""
        self._put.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await self._take.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        if isinstance(event, MeshdError):
            raise event
        return event

    def timings(self) -> Timings:
        """So far. What came in one moment, as a single token does, counts over the whole time."""
        now, times = trio.current_time(), self.token_times
        whole_s, rest_s = now - self.began, times[-1] - times[0] if times else 0.0
        return Timings(
            ttft_ms=(times[0] - self.began) * 1000.0 if times else 0.0,
            total_ms=whole_s * 1000.0,
            tokens_per_s=(len(times) - 1) / rest_s if rest_s > 0.0 else len(times) / whole_s if whole_s > 0.0 else 0.0,
        )


def _nothing() -> None:
    """Nothing runs that could be stopped."""


class _Driven:
    """One session core with what its shell needs."""

    def __init__(self, core: Session, answer: _Answer, nursery: trio.Nursery) -> None:
        self.core = core
        self.answer = answer
        self.nursery = nursery
        self.began = trio.current_time()
        self.watched: set[NodeId] = set()
        self.finished: str | None = None
        self.failure: MeshdError | None = None
        self.changed = trio.Event()
        self.waits_until = math.inf


class Entry:
    """Runs requests of this node's clients."""

    def __init__(self, parts: EntryParts) -> None:
        self._parts = parts
        self._driven: dict[SessionId, _Driven] = {}
        self._answers = 0
        self._nursery: trio.Nursery | None = None
        self._courier: Courier | None = None
        self.counters: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Requests that run."""
        return self._answers

    @property
    def deaf(self) -> bool:
        """True while requests wait for several other nodes and none of those is heard: then it is this node that is cut off.
        Nodes that were given up are not waited for."""
        awaited = {node for driven in self._driven.values() for node in driven.core.nodes} - {self._parts.self_id}
        if len(awaited) < 2:
            return False  # one that is silent is that one's affair
        links = [link for node in awaited if (link := self._parts.links.live(node)) is not None]
        heard = max(driven.began for driven in self._driven.values())
        return trio.current_time() > max([heard, *(link.last_heard for link in links)]) + DEAF_S

    def serves(self, session: SessionId) -> bool:
        """True while a request of this entry runs as that session."""
        return session in self._driven

    async def run(self, courier: Courier, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        self._courier = courier
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # no more requests

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Event]]:
        """Run ``request`` while inside. Raises the caller's errors here, the room's from the iterator."""
        if self._nursery is None:
            raise NotReady("the chain is not running yet")
        spec = self._parts.model()
        if spec is None:
            raise NotReady("this node knows no model yet")
        request = self._checked(request, spec)
        if self._answers >= self._parts.max_sessions:
            raise Busy(f"{self._parts.max_sessions} requests run at this node; try another or later")
        answer = _Answer(self._new_id(), request, spec)
        self._answers += 1
        self._nursery.start_soon(self._run_answer, answer)
        try:
            yield answer
        finally:
            answer.scope.cancel()

    def deliver(self, source: NodeId, message: ChainMessage) -> bool:
        """A message for a session of this entry; False if it has none of that id."""
        driven = self._driven.get(message.session)
        if driven is None:
            return False
        if isinstance(message, Lost) and message.why is Why.ROWS and message.node in driven.core.nodes:
            self._parts.notice("bad_rows", {"peer": message.node, "by": source, "reason": message.detail})
        self._carry(driven, driven.core.receive(message, source, trio.current_time()))
        return True

    def lost(self, session: SessionId, node: NodeId, why: Why, attempt: int | None) -> None:
        """The courier cannot reach ``node``. Without an attempt the node's watch will say so itself."""
        driven = self._driven.get(session)
        if driven is not None and attempt is not None:
            self._carry(driven, driven.core.unreachable(node, why, trio.current_time(), attempt=attempt))

    # --- a request ----------------------------------------------------------------------------------------------------

    def _checked(self, request: GenerationRequest, spec: ModelSpec) -> GenerationRequest:
        """Refuse what cannot be; stop at the end of the context."""
        if not request.prompt:
            raise CallerError("an empty prompt has no next token", param="prompt")
        if request.max_tokens < 1:
            raise CallerError("max_tokens must be at least 1", param="max_tokens")
        if not all(0 <= i < spec.vocab_size for i in (*request.prompt, *request.forced)):
            raise CallerError(f"token ids of {spec.name} are 0..{spec.vocab_size - 1}", param="tokens")
        room = spec.context - len(request.prompt)
        if room < 1 or len(request.forced) > room:
            raise ContextLengthExceeded(
                f"{len(request.prompt)} prompt tokens do not fit the context of {spec.context}", param="prompt"
            )
        return replace(request, max_tokens=min(request.max_tokens, room))

    def _new_id(self) -> SessionId:
        return SessionId(f"{self._parts.rng.getrandbits(128):032x}")

    async def _run_answer(self, answer: _Answer) -> None:
        """Everything of one request, from its first route to its last event."""
        try:
            with answer.scope:
                if answer.request.sticky:
                    await self._one_session(answer, answer.request, answer.session)
                else:
                    await self._session_a_token(answer)
        except MeshdError as error:
            answer.put(error)
        except Exception as error:  # a mistake in one request must not end the others
            log.exception("request %s", answer.session)
            answer.put(MeshdError(f"internal error ({type(error).__name__})"))
        finally:
            self._answers -= 1
            answer.close()

    async def _one_session(self, answer: _Answer, request: GenerationRequest, session: SessionId) -> None:
        planned = await self._plan(answer, request)
        answer.started(planned)
        core, reason = await self._run_session(answer, request, session, planned)
        answer.put(self._finished(answer, core, planned, reason))

    async def _session_a_token(self, answer: _Answer) -> None:
        request = answer.request
        forced, started = request.forced, False
        expires = math.inf if request.deadline_s is None else answer.began + request.deadline_s
        while True:
            planned = await self._plan(answer, request)
            if not started:
                answer.started(planned)
                started = True
            left = None if request.deadline_s is None else max(0.0, expires - trio.current_time())
            wanted = min(request.max_tokens, len(forced) + 1)
            one = replace(request, forced=forced, max_tokens=wanted, deadline_s=left)
            core, reason = await self._run_session(answer, one, self._new_id(), planned)
            forced = tuple(core.ids[len(request.prompt) :])
            if reason == "stop" or answer.stopped or len(forced) >= request.max_tokens:
                answer.put(self._finished(answer, core, planned, reason))
                return

    async def _plan(self, answer: _Answer, request: GenerationRequest) -> PlannedRoute:
        """A route; layers whose proof is pending are waited for up to a second."""
        parts, spec = self._parts, answer.spec
        give_up = trio.current_time() + PENDING_S
        while True:
            now = trio.current_time()
            try:
                return parts.planner.choose(
                    parts.directory(), spec.digest, spec.num_layers, pinned=request.pinned, now=now
                )
            except StageUnavailable as error:
                replicas = DirectoryReplicas(parts.planner, parts.directory, spec.digest)
                if not any(replicas.pending(layers) for layers in error.missing):
                    raise
                if now >= give_up:
                    raise StageUnavailable(error.missing, pending=True) from None
            await trio.sleep(RETRY_S)

    async def _run_session(
        self, answer: _Answer, request: GenerationRequest, session: SessionId, planned: PlannedRoute
    ) -> tuple[Session, str]:
        """One session to its end. Raises what it failed with."""
        parts, spec, began = self._parts, answer.spec, trio.current_time()
        core = Session(
            session,
            parts.self_id,
            request,
            digest=spec.digest,
            num_layers=spec.num_layers,
            route=planned.hops,
            replicas=DirectoryReplicas(parts.planner, parts.directory, spec.digest, planned.hops),
            now=began,
            drafts=parts.drafts(request) if parts.drafts and request.drafts else None,
        )
        parts.planner.begin(planned, began)
        parts.notice("route", {"session": session, "mode": planned.mode, "signature": planned.signature})
        failure: MeshdError | None = None
        try:
            async with trio.open_nursery() as nursery:
                driven = self._driven[session] = _Driven(core, answer, nursery)
                answer.on_stop = lambda: self._carry(driven, core.stop())
                try:
                    self._carry(driven, core.start(began))
                    if answer.stopped:
                        self._carry(driven, core.stop())
                    failure = await self._drive(driven)
                finally:  # before the nursery closes: what still arrives must find the session over
                    self._carry(driven, core.cancel())
                nursery.cancel_scope.cancel()
        finally:
            self._driven.pop(session, None)
            if self._courier is not None:
                self._courier.close(session)
            now = trio.current_time()
            tokens = len(core.ids) - len(request.prompt) - len(request.forced)
            failed = failure is not None
            parts.planner.finish(planned, core.route, tokens=tokens, seconds=now - began, failed=failed, now=now)
        if failure is not None:
            raise failure
        return core, driven.finished or "length"

    async def _drive(self, driven: _Driven) -> MeshdError | None:
        """The session's timer, until it is over."""
        core = driven.core
        while not core.over:
            self._hear(driven)
            driven.changed = trio.Event()
            driven.waits_until = core.deadline()
            with trio.move_on_at(driven.waits_until):
                await driven.changed.wait()
                continue
            self._hear(driven)
            now = trio.current_time()
            if now >= core.deadline():
                self._carry(driven, core.tick(now))
        return driven.failure

    def _hear(self, driven: _Driven) -> None:
        for node in driven.watched:
            link = self._parts.links.live(node)
            if link is not None:
                driven.core.heard(node, link.last_heard)

    async def _watch(self, driven: _Driven, watch: Watch) -> None:
        """Keep PINGs going to a hop; say so when its link ends or cannot be made."""
        why = Why.REFUSED
        try:
            link = await self._parts.links.get(watch.node)
            why = Why.RESET
            async with link.watch():
                await link.closed()
        except MeshdError:
            pass  # the same as a link that ended
        self._carry(driven, driven.core.unreachable(watch.node, why, trio.current_time(), ticket=watch.ticket))

    def _finished(self, answer: _Answer, core: Session, planned: PlannedRoute, reason: str) -> Finished:
        return Finished(
            reason=reason,
            route=core.report(),
            routing=RouteUse(planned.mode, planned.signature),
            recoveries=tuple(answer.recoveries),
            timings=replace(answer.timings(), drafted_tokens=core.drafted, accepted_tokens=core.accepted),
            cached_tokens=core.cached,
        )

    # --- effects ------------------------------------------------------------------------------------------------------

    def _carry(self, driven: _Driven, effects: Iterable[SessionEffect]) -> None:
        if self._courier is None:
            raise RuntimeError("the entry is not running")
        answer = driven.answer
        for effect in effects:
            match effect:
                case Send():
                    self._courier.send(effect.to, effect.message, effect.via)
                case Emit():
                    answer.token_times += [trio.current_time()] * len(effect.choices)
                    answer.put(Tokens(effect.choices))
                case Watch():
                    if effect.node != self._parts.self_id:
                        driven.watched.add(effect.node)
                        driven.nursery.start_soon(self._watch, driven, effect)
                case Failover():
                    self._tell_failover(driven, effect)
                case Recovered():
                    self._tell_recovered(driven, effect.recovery)
                case Finish():
                    driven.finished = effect.reason
                case Fail():
                    driven.failure = effect.error
        # Progress moves the deadline away: then the timer may find out by itself, which costs nothing a token.
        if driven.core.over or driven.core.due() < driven.waits_until:
            driven.changed.set()

    def _tell_failover(self, driven: _Driven, failover: Failover) -> None:
        self.counters["failovers"] += 1
        self.counters["hedges"] += failover.hedge
        swaps = [
            {"layers": swap.layers.json(), "from": swap.source, "to": swap.to, "reason": swap.reason}
            for swap in failover.swaps
        ]
        self._parts.notice("failover", {"session": driven.core.session, "hedge": failover.hedge, "swaps": swaps})

    def _tell_recovered(self, driven: _Driven, recovery: Recovery) -> None:
        driven.answer.recoveries.append(recovery)
        self.counters["recoveries"] += 1
        self.counters["replayed_tokens"] += recovery.replayed_tokens
        fields = {
            "session": driven.core.session,
            "layers": recovery.layers.json(),
            "from": recovery.from_node,
            "to": recovery.to_node,
            "reason": recovery.reason,
            "stall_ms": round(recovery.stall_ms, 1),
            "replayed_tokens": recovery.replayed_tokens,
            "exact": recovery.exact,
        }
        self._parts.notice("recovered", fields)
