"""One exchange on a `PeerLink`: what a caller or a handler holds in its hands.

Owns the messages that arrived and were not read, and how the exchange ended. All of its sending goes through the link's
multiplexer, so leaving a stream in any way, cancellation included, tears nothing and is told to the peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol

import trio

from meshd.errors import MeshdError, StreamCancelled
from meshd.links.assemble import Inbound
from meshd.links.multiplex import Multiplexer
from meshd.links.wire import Message
from meshd.vocabulary import NodeId

SEND_AHEAD_BYTES: Final = 256 << 10
"""A stream takes another message while less than this waits to be written."""


class Carrier(Protocol):
    """What a stream needs of the link that carries it."""

    @property
    def peer(self) -> NodeId: ...

    @property
    def mux(self) -> Multiplexer: ...

    @property
    def room(self) -> trio.lowlevel.ParkingLot:
        """Where senders wait while their stream has enough queued."""
        ...

    def flush(self) -> None:
        """Write what may go, as far as the transport takes it."""
        ...

    def prune(self) -> None:
        """Forget streams that both ends finished."""
        ...


class PeerStream:
    """One exchange on a link, a `meshd.links.wire.Stream`. As a context manager it cancels what it did not finish."""

    __slots__ = (
        "_accepted",
        "_answer",
        "_arrived",
        "_deaf",
        "_ended",
        "_error",
        "_first",
        "_inbox",
        "_link",
        "_sent_end",
        "_take",
        "id",
    )

    def __init__(self, link: Carrier, stream: int, first: Inbound | None) -> None:
        self.id = stream
        self._link = link
        self._first = first
        self._accepted = first is not None
        self._inbox: deque[Inbound] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._deaf = False
        self._error: MeshdError | None = None
        self._ended = False
        self._sent_end = False
        self._take: Callable[[Message], None] | None = None
        self._answer: Callable[[Message | MeshdError | None], None] | None = None

    @property
    def peer(self) -> NodeId:
        return self._link.peer

    def first(self) -> Message | None:
        """The message that opened a peer's stream, once; None when the stream broke before anybody looked."""
        first, self._first = self._first, None
        return self._read(first) if first is not None else None

    async def send(self, message: Message) -> None:
        """Raises LinkLost, StreamCancelled, the peer's error, ValueError (a message above a cap)."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        while self._link.mux.queued_bytes(self.id) >= SEND_AHEAD_BYTES:
            await self._link.room.park()
            self._check()
        if self._sent_end:
            raise RuntimeError("a message after the end of the stream")
        self._link.mux.send(self.id, message)
        self._link.flush()

    def offer(self, message: Message) -> bool:
        """Raises ValueError (a message above a cap)."""
        link = self._link
        if self._error is not None or self._sent_end or link.mux.queued_bytes(self.id) >= SEND_AHEAD_BYTES:
            return False
        link.mux.send(self.id, message)
        link.flush()
        return True

    async def receive(self) -> Message | None:
        """Messages that came before an error are delivered before it. Raises LinkLost, StreamCancelled, the peer's error."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._inbox:
            self._check()
            if self._ended:
                return None
            await self._arrived.park()
        return self._read(self._inbox.popleft())

    async def listen(self, take: Callable[[Message], None]) -> None:
        failures: list[Exception] = []

        def guarded(message: Message) -> None:
            """Called by the link's reader, which serves other streams too: a failure belongs to who listens."""
            try:
                take(message)
            except Exception as error:  # noqa: BLE001  # raised below
                failures.append(error)
                self._take = None
                self._arrived.unpark_all()

        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            while True:
                while self._inbox and not failures:
                    guarded(self._read(self._inbox.popleft()))
                if failures:
                    raise failures[0]
                self._check()
                if self._ended:
                    return
                self._take = guarded
                await self._arrived.park()
        finally:
            self._take = None
            self._read_no_more()
            self._link.flush()

    def tell(self, answer: Callable[[Message | MeshdError | None], None]) -> None:
        """Instead of `receive`, for a stream that was just opened: ``answer`` gets what comes first, once. A message, the peer's
        end (None), or why nothing will come; not what this side does itself."""
        self._answer = answer

    async def end(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.end_now()
        self._link.flush()

    def end_now(self) -> None:
        """Queue the end; the link writes it with what is queued before it."""
        if self._error is None and not self._sent_end:
            self._sent_end = True
            self._link.mux.end(self.id)

    def cancel(self) -> None:
        self._link.mux.cancel(self.id)
        self._leave()

    def fail(self, error: Exception) -> None:
        self._link.mux.fail(self.id, error)
        self._leave()

    def __enter__(self) -> PeerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sent_end and (self._ended or self._accepted):
            self._leave()  # what is queued still goes; whoever serves a stream owes it no more reading
        else:
            self.cancel()

    # --- what the link tells it ---------------------------------------------------------------------------------------

    def arrive(self, inbound: Inbound) -> None:
        """A message came."""
        if self._error is not None or self._deaf:
            self._link.mux.consumed(self.id, inbound)
        elif self._take is not None:
            self._take(self._read(inbound))
        elif self._answer is not None:
            self._give(self._read(inbound))
        else:
            self._inbox.append(inbound)
            self._arrived.unpark_all()

    def finish(self) -> None:
        """The peer ended its side."""
        self._ended = True
        self._give(None)
        self._arrived.unpark_all()

    def break_off(self, error: MeshdError) -> None:
        """No more from either side. The first error stays."""
        if self._error is None:
            self._error = error
            self._give(error)
        self._arrived.unpark_all()
        self._link.room.unpark_all()

    def _give(self, what: Message | MeshdError | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer(what)

    def _read_no_more(self) -> None:
        """What came and what comes goes back to the link's budget, or the peer could not even bring its end."""
        self._deaf = True
        for inbound in (*self._inbox, *([self._first] if self._first else ())):
            self._link.mux.consumed(self.id, inbound)
        self._inbox.clear()
        self._first = None

    def _leave(self) -> None:
        """Nothing more of this stream is wanted here; what is queued still goes."""
        self._answer = None
        self._read_no_more()
        self.break_off(StreamCancelled("this side left the stream"))
        self._link.prune()
        self._link.flush()

    def _read(self, inbound: Inbound) -> Message:
        self._link.mux.consumed(self.id, inbound)
        self._link.flush()
        return inbound.message

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)
