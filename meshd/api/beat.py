"""Signs of life in a stream that has nothing to say yet: comments, for clients that ask for them (``X-Mesh-Beat``).

An entry whose device hangs looks to its client like one that computes. A client with another entry to go to must tell the two
apart within a second, so it asks to be sent something every `BEAT_S`: then silence means that the entry is gone. The status line
waits no longer for the first token than any other sign does; what fails after that is told in an event. An entry that hears
nobody gives no sign: what it sends may still arrive, but no answer will come of it, and its client had better go on at another.
Clients that do not ask see no comment, and every failure before the first token as a status.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from meshd.api.message import Headers, Response, Writer
from meshd.api.sse import KEEP_ALIVE, SSE_HEADERS
from meshd.errors import MeshdError

HEADER: Final = "x-mesh-beat"
BEAT_S: Final = 0.25
LISTEN_S: Final = 0.1


class _Beating:
    """A `Writer` that speaks when its owner is silent. The status line may be out before the owner's: then that is dropped."""

    def __init__(self, writer: Writer, deaf: Callable[[], bool]) -> None:
        self._writer = writer
        self._deaf = deaf
        self._lock = trio.Lock()
        self._due = trio.current_time() + BEAT_S

    @property
    def started(self) -> bool:
        return self._writer.started

    async def start(self, status: int, headers: Headers) -> None:
        async with self._lock:
            if not self._writer.started:
                await self._writer.start(status, headers)
            self._spoke()

    async def send(self, data: bytes) -> None:
        async with self._lock:
            await self._writer.send(data)
            self._spoke()

    def _spoke(self) -> None:
        self._due = trio.current_time() + BEAT_S

    async def beat(self) -> None:
        """Until cancelled, or until nothing goes out any more: that is for the owner to notice."""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, MeshdError):
            while True:
                await trio.sleep_until(self._due)
                if trio.current_time() < self._due:
                    continue
                if self._deaf():
                    self._due = trio.current_time() + LISTEN_S
                else:
                    await self.start(200, SSE_HEADERS)
                    await self.send(KEEP_ALIVE)

    async def rest(self) -> None:
        """Once nothing is being sent: from now on nobody but the owner speaks."""
        await self._lock.acquire()


async def beating(
    writer: Writer, run: Callable[[Writer], Awaitable[Response | None]], *, deaf: Callable[[], bool]
) -> Response | None:
    """Run a streamed answer with signs of life, but for while this node is ``deaf``. Raises what it raises."""
    beating_writer = _Beating(writer, deaf)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beating_writer.beat)
        try:
            await run(beating_writer)
        except Exception as error:  # noqa: BLE001  # told below, outside the nursery, as what it is
            failure = error
        await beating_writer.rest()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return None
