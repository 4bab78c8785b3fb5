"""The probed side: lets peers probe this node's engine, one at a time.

Owns who may probe when. A joiner is probed by its whole room at once; whoever finds the place taken waits its turn, and the
queue is bounded. The engine computes probes beside its sessions, in the same batches. Errors reach the prober through its stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from meshd.admission.book import ProbeGate
from meshd.admission.exam import sit
from meshd.admission.probe_wire import answer_message, request_untrusted
from meshd.errors import Busy, NotReady
from meshd.inference.engine import Engine
from meshd.links.wire import Message, Stream
from meshd.vocabulary import NodeId

MAX_WAITING: Final = 64
ANSWER_S: Final = 15.0


class ProbeServer:
    """Answers streams of kind ``probe``. ``engine`` is the stage while it can be run."""

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self._engine = engine
        self._gate = ProbeGate()
        self._freed = trio.lowlevel.ParkingLot()
        self.answered = 0

    async def serve(self, peer: NodeId, message: Message, stream: Stream) -> None:
        """One probe. Raises what the caller should end the stream with: BadFrame, Busy, NotReady, the engine's errors."""
        request = request_untrusted(message)
        with trio.move_on_after(ANSWER_S):
            await self._enter(peer)
            try:
                engine = self._engine()
                if engine is None:
                    raise NotReady("this node has no engine to probe now")
                answer = await sit(engine, request)
            finally:
                self._gate.leave(peer)
                self._freed.unpark()
            self.answered += 1
            await stream.send(answer_message(answer))
            await stream.end()
            return
        raise Busy(f"the probe took longer than {ANSWER_S:g} s")

    async def _enter(self, peer: NodeId) -> None:
        while not self._gate.enter(peer, trio.current_time()):
            if len(self._freed) >= MAX_WAITING:
                raise Busy("too many probes wait at this node")
            await self._freed.park()
