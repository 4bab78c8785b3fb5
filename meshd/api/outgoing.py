"""The way out of one exchange on a connection: an answer, whole or in pieces, in h11's framing.

Every write has a deadline, so a client that does not read ends its own answer only. Raises what trio's streams raise when the
client is gone, and trio.TooSlowError when it takes nothing.
"""

from __future__ import annotations

from typing import Final

import h11
import trio

from meshd.api.message import Headers, Response, request_id, with_defaults
from meshd.api.sse import are_events
from meshd.links.transport import SocketTransport

_WRITE_BYTES: Final = 256 * 1024  # each slice of a large answer has its own write deadline


class Outgoing:
    """The `Writer` of one exchange."""

    def __init__(self, stream: trio.SocketStream, connection: h11.Connection, write_s: float) -> None:
        self._transport = SocketTransport(stream)
        self._h11 = connection
        self._write_s = write_s
        self._head_only = False
        self.request_id = request_id(None)
        self.close = False
        self._started = False
        self._events = False
        self._torn = False  # a part of what was to be written is lost

    @property
    def started(self) -> bool:
        return self._started

    @property
    def unfinished(self) -> bool:
        """True when the answer was begun and broken off."""
        return self._started and self._h11.our_state is h11.SEND_BODY

    @property
    def between_events(self) -> bool:
        """True when a stream of events was begun and another event may follow."""
        return self._events and self.unfinished and not self._torn

    def begin(self, head_only: bool, name: str) -> None:
        self._head_only = head_only
        self.request_id = name

    async def start(self, status: int, headers: Headers) -> None:
        own = (*headers, ("X-Request-Id", self.request_id), *((("Connection", "close"),) if self.close else ()))
        event = h11.Response(status_code=status, headers=list(with_defaults(own)), reason=b"")
        data = self._h11.send(event)
        self._started, self._events = True, are_events(headers)
        await self._write(data)

    async def send(self, data: bytes) -> None:
        if data and not self._head_only:
            await self._write(self._h11.send(h11.Data(data=data)))

    async def end(self) -> None:
        await self._write(self._h11.send(h11.EndOfMessage()))

    async def respond(self, response: Response) -> None:
        await self.start(response.status, (*response.headers, ("Content-Length", str(len(response.body)))))
        await self.send(response.body)
        await self.end()

    async def _write(self, data: bytes | None) -> None:
        view = memoryview(data or b"")
        while view:
            self._transport.write(view[:_WRITE_BYTES])
            view = view[_WRITE_BYTES:]
            if self._transport.pending:  # rare: a token's event fits into every buffer
                self._torn = bool(view)  # if it is cancelled here
                with trio.fail_after(self._write_s):
                    await self._transport.drain()
        self._torn = False
