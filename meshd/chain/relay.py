"""The hop side of a node: carries out what `Hops` decides. A trio shell.

Owns what waits for the engine and the hops' timer. An engine that takes runs without a task gets them so (`Submitting`).
Decisions are in `hops` and `hop`; streams are the courier's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import trio

from meshd.chain.courier import Courier
from meshd.chain.effects import Begin, Compute, Forget, HopEffect, ReadLog, Send
from meshd.chain.hops import Failed, Held, Hops, Kept, Missing, Outcome, Rows
from meshd.chain.messages import ChainMessage, ForEntry, Why
from meshd.errors import BadTensor, Busy, MeshdError, NeedRows, RangeNotHeld
from meshd.inference.engine import Engine, Ran, submitting
from meshd.vocabulary import NodeId, SessionId

TICK_S: Final = 0.5  # hops' timers are seconds; only while there are sessions


class Relay:
    """Serves this node's layers to sessions of any entry. ``engine`` gives what is loaded now, ``forgotten`` hears of sessions
    that are over here."""

    def __init__(
        self,
        self_id: NodeId,
        engine: Callable[[], Engine | None],
        *,
        forgotten: Callable[[SessionId], None],
        max_sessions: int,
        max_computing: int,
    ) -> None:
        self._engine = engine
        self._forgotten = forgotten
        self._hops = Hops(self_id, max_sessions=max_sessions, max_computing=max_computing)
        self._stops: dict[SessionId, set[Callable[[], None]]] = {}  # what ends the computations of a session
        self._effects: deque[HopEffect] = deque()
        self._carrying = False
        self._busy = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._courier: Courier | None = None

    @property
    def sessions(self) -> int:
        """Sessions with state at this node."""
        return len(self._hops)

    @property
    def running(self) -> int:
        """Those of them whose entry is there."""
        return self._hops.running

    def serves(self, session: SessionId) -> bool:
        """True while this node is a hop of it."""
        return self._hops.entry_of(session) is not None

    async def run(self, courier: Courier, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        self._courier = courier
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await self._keep_time()
            finally:
                self._nursery = None  # the node stops: nothing is computed any more

    async def _keep_time(self) -> None:
        """Tick the hops while there are any."""
        while True:
            if not len(self._hops):
                self._busy = trio.Event()
                await self._busy.wait()
            await trio.sleep(TICK_S)
            self._carry(self._hops.tick(trio.current_time()))

    def deliver(self, source: NodeId, message: ChainMessage) -> None:
        """A message for a hop, or one that a hop passes on towards its entry."""
        if isinstance(message, ForEntry):
            entry = self._hops.entry_of(message.session)
            upstream = self._hops.upstream_of(message.session)
            if entry is not None and self._courier is not None and upstream != source:
                self._courier.send(entry, message, upstream)
            return
        engine = self._engine()
        info = engine.info if engine else None
        self._hops.held = (
            Held(info.spec.digest, info.layers, info.generation, windows=info.deterministic) if info else None
        )
        self._hops.computing = len(self._stops)
        self._carry(self._hops.receive(message, source, trio.current_time()))
        self._busy.set()

    def lost(self, session: SessionId, node: NodeId, why: Why, attempt: int | None) -> None:
        """The courier cannot reach ``node`` for ``session``."""
        if node == self._hops.entry_of(session):
            self._hops.entry_gone(node, trio.current_time())
        self._carry(self._hops.unreachable(session, node, why, attempt))

    def _carry(self, effects: Iterable[HopEffect]) -> None:
        """Effects in the order in which they were decided; those of an engine that answers at once come after."""
        self._effects += effects
        if self._carrying:
            return
        self._carrying = True
        try:
            while self._effects:
                self._carry_out(self._effects.popleft())
        finally:
            self._carrying = False

    def _carry_out(self, effect: HopEffect) -> None:
        if self._courier is None or self._nursery is None:
            return
        match effect:
            case Send():
                self._courier.send(effect.to, effect.message, effect.via)
            case Compute() if self._submit(effect):
                pass
            case Begin() | Compute() | ReadLog():
                # Known from now on: the session may be over before the task has its first turn.
                scope = trio.CancelScope()
                self._stops.setdefault(effect.session, set()).add(scope.cancel)
                self._nursery.start_soon(self._work, effect, scope)
            case Forget():
                self._forget(effect.session)

    def _submit(self, job: Compute) -> bool:
        """Have the engine begin a run now; False where it needs a task."""
        engine = submitting(self._engine())
        if engine is None:
            return False
        settled: list[Ran | MeshdError] = []
        running: list[Callable[[], None]] = []

        def settle(result: Ran | MeshdError) -> None:
            settled.append(result)
            for stop in running:
                self._forget_stop(job.session, stop)
            outcome = result if isinstance(result, Ran) else _trouble(result)
            if self._courier is not None:
                self._courier.at_once(lambda: self._carry(self._hops.settle(job, outcome, trio.current_time())))

        stop = engine.submit(job.run, settle)
        if stop is not None and not settled:
            running.append(stop)
            self._stops.setdefault(job.session, set()).add(stop)
        return stop is not None

    def _forget_stop(self, session: SessionId, stop: Callable[[], None]) -> None:
        stops = self._stops.get(session)
        if stops is not None:
            stops.discard(stop)
            if not stops:
                del self._stops[session]

    def _forget(self, session: SessionId) -> None:
        for stop in self._stops.pop(session, ()):
            stop()
        engine = self._engine()
        if engine is not None:
            engine.drop(session)
        self._forgotten(session)

    async def _work(self, job: Begin | Compute | ReadLog, scope: trio.CancelScope) -> None:
        """One question to the engine."""
        if scope.cancel_called:
            return
        with scope:
            try:
                outcome = await self._ask_engine(job)
            finally:
                self._forget_stop(job.session, scope.cancel)
        if scope.cancelled_caught:
            return
        self._carry(self._hops.settle(job, outcome, trio.current_time()))

    async def _ask_engine(self, job: Begin | Compute | ReadLog) -> Outcome:
        engine = self._engine()
        outcome: Outcome
        try:
            if engine is None:
                outcome = Failed(Why.STALE, "this node holds no layers any more")
            elif isinstance(job, Compute):
                outcome = await engine.run(job.run)
            elif isinstance(job, Begin):
                outcome = Kept(await engine.open(job.opening))
            else:
                outcome = Rows(await engine.boundary(job.session, job.layers, job.start, job.end))
        except MeshdError as error:
            outcome = _trouble(error)
        return outcome


def _trouble(error: MeshdError) -> Missing | Failed:
    """What an engine's refusal means to a hop."""
    if isinstance(error, NeedRows):
        return Missing(error.have)
    why = {Busy: Why.FULL, RangeNotHeld: Why.STALE, BadTensor: Why.ROWS}
    return Failed(next((why[kind] for kind in why if isinstance(error, kind)), Why.ENGINE), error.message)
