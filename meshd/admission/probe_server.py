"""The probed side: lets peers probe this node's engine, one at a time, and put a few rows through it for a spot check.

Owns who may probe when. A joiner is probed by its whole room at once; whoever finds the place taken waits its turn, and the
queue is bounded. The engine computes probes beside its sessions, in the same batches. Errors reach the prober through its stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import trio

from meshd.admission.book import ProbeGate
from meshd.admission.exam import check, sit
from meshd.admission.probe_wire import answer_message, request_untrusted
from meshd.admission.qspec import sitting_s
from meshd.admission.spot_wire import RAN, ROWS, rows_untrusted
from meshd.errors import Busy, NotReady
from meshd.inference.engine import Engine
from meshd.links.wire import Message, Stream
from meshd.vocabulary import NodeId

MAX_WAITING: Final = 64
ANSWER_S: Final = 15.0


class ProbeServer:
    """Answers streams of the kinds ``probe`` and ``probe.rows``. ``engine`` is the stage while it can be run."""

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self._engine = engine
        self._gate = ProbeGate()
        self._freed = trio.lowlevel.ParkingLot()
        self._spots = trio.CapacityLimiter(1)
        self.answered = 0

    async def serve(self, peer: NodeId, message: Message, stream: Stream) -> None:
        """One probe. Raises what the caller should end the stream with: BadFrame, Busy, NotReady, the engine's errors."""
        limit_s = self._limit_s()
        work = self._spot(message) if message.kind == ROWS else self._probe(peer, message, limit_s)
        answer: Message | None = None
        with trio.move_on_after(limit_s):
            answer = await work
        if answer is None:
            raise Busy(f"the probe took longer than {limit_s:.0f} s")
        self.answered += 1
        await stream.send(answer)
        await stream.end()

    async def _probe(self, peer: NodeId, message: Message, limit_s: float) -> Message:
        request = request_untrusted(message)
        await self._enter(peer, limit_s)
        try:
            return answer_message(await sit(self._present(), request))
        finally:
            self._gate.leave(peer)
            self._freed.unpark()

    async def _spot(self, message: Message) -> Message:
        asked = rows_untrusted(message, ROWS)
        if self._spots.statistics().tasks_waiting >= MAX_WAITING:
            raise Busy("too many spot checks wait at this node")
        async with self._spots:
            engine = self._present()
            check(engine, asked)
            out = await engine.forward(asked.layers, asked.rows, asked.n)
        return replace(asked, rows=out).message(RAN)

    def _limit_s(self) -> float:
        """As long as the prober waits, and a little for those that were here before it."""
        info = engine.info if (engine := self._engine()) is not None else None
        return ANSWER_S + (sitting_s(info.layers, info.layer_ms_64) if info is not None else 0.0)

    def _present(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise NotReady("this node has no engine to probe now")
        return engine

    async def _enter(self, peer: NodeId, limit_s: float) -> None:
        while not self._gate.enter(peer, trio.current_time(), limit_s):
            if len(self._freed) >= MAX_WAITING:
                raise Busy("too many probes wait at this node")
            await self._freed.park()
