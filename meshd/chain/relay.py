"""The hop side of a node: carries out what `Hops` decides. A trio shell.

Owns the tasks that wait for the engine and the hops' timer. Decisions are in `hops` and `hop`; streams are the courier's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from meshd.chain.courier import Courier
from meshd.chain.effects import Begin, Compute, Forget, HopEffect, ReadLog, Send
from meshd.chain.hops import Failed, Held, Hops, Kept, Missing, Outcome, Rows
from meshd.chain.messages import ChainMessage, Lost, Opened, Progress, Reply, Why
from meshd.errors import BadTensor, Busy, MeshdError, NeedRows, RangeNotHeld
from meshd.inference.engine import Engine
from meshd.vocabulary import NodeId, SessionId

TICK_S: Final = 0.5  # hops' timers are seconds; only while there are sessions


class Relay:
    """Serves this node's layers to sessions of any entry. ``engine`` gives what is loaded now."""

    def __init__(self, self_id: NodeId, engine: Callable[[], Engine | None], *, max_sessions: int) -> None:
        self._engine = engine
        self._hops = Hops(self_id, max_sessions=max_sessions)
        self._scopes: dict[SessionId, set[trio.CancelScope]] = {}
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
        if isinstance(message, Reply | Lost | Progress | Opened):
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
        self._carry(self._hops.receive(message, source, trio.current_time()))
        self._busy.set()

    def lost(self, session: SessionId, node: NodeId, why: Why, attempt: int | None) -> None:
        """The courier cannot reach ``node`` for ``session``."""
        if node == self._hops.entry_of(session):
            self._hops.entry_gone(node, trio.current_time())
        self._carry(self._hops.unreachable(session, node, why, attempt))

    def _carry(self, effects: Iterable[HopEffect]) -> None:
        if self._courier is None or self._nursery is None:
            return
        for effect in effects:
            match effect:
                case Send():
                    self._courier.send(effect.to, effect.message, effect.via)
                case Begin() | Compute() | ReadLog():
                    self._nursery.start_soon(self._work, effect)
                case Forget():
                    self._forget(effect.session)

    def _forget(self, session: SessionId) -> None:
        for scope in self._scopes.pop(session, ()):
            scope.cancel()
        engine = self._engine()
        if engine is not None:
            engine.drop(session)
        if self._courier is not None:
            self._courier.close(session)

    async def _work(self, job: Begin | Compute | ReadLog) -> None:
        """One question to the engine."""
        with trio.CancelScope() as scope:
            scopes = self._scopes.setdefault(job.session, set())
            scopes.add(scope)
            try:
                outcome = await self._ask_engine(job)
            finally:
                scopes.discard(scope)
                if not scopes and self._scopes.get(job.session) is scopes:
                    del self._scopes[job.session]
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
        except NeedRows as error:
            outcome = Missing(error.have)
        except Busy as error:
            outcome = Failed(Why.FULL, error.message)
        except RangeNotHeld as error:
            outcome = Failed(Why.STALE, error.message)
        except BadTensor as error:
            outcome = Failed(Why.ROWS, error.message)
        except MeshdError as error:
            outcome = Failed(Why.ENGINE, error.message)
        return outcome
