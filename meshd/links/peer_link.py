"""A live link to one peer: the multiplexer on a trio stream.

One task reads, one waits for a connection that does not keep up, one pings; `PeerLink.run` supervises them and returns when the
link is gone, whatever the reason. What is queued is written within `flush`, by whoever queued it, for as long as the transport
takes it; then the waiting task goes on. Only whole frames are handed to the transport and it alone keeps what is left of one,
so a cancelled caller never tears a frame: `send` queues whole messages and waits only for room.

Liveness here is about the connection: a link closes itself when its pings stay unanswered for `LinkTiming`'s silence. Whoever
waits for an answer judges much sooner, by `last_heard`. A peer's own pings say nothing of what reaches it, so only what else it
sends counts as heard: one that can still speak but hears nothing is silent. Silence is counted in pings sent, none for more than
its interval, and not in time passed, so a device that was suspended does not close its links on waking. What was borne while
nobody watched does not count against whoever begins to. Long before that a link is `stuck`: one that is watched then says so
(``when_stuck``), so that a new connection can be tried beside it while those who wait still have time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio

from meshd.errors import BadFrame, LinkLost, StreamCancelled
from meshd.links.multiplex import (
    Arrived,
    Cancelled,
    Ended,
    Event,
    Failed,
    GoingAway,
    Multiplexer,
    Opened,
    Pinged,
    Ponged,
)
from meshd.links.peer_stream import PeerStream
from meshd.links.transport import READ_BYTES, ClosedTransport, transport_of
from meshd.links.wire import Message
from meshd.vocabulary import NodeId

PINGS_KEPT: Final = 8


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """How often to ping, while watched and while idle, how late a pong makes a link stuck (two lost segments in a row, by TCP's
    least time-outs of 0.2 and 0.4 s), and how long to bear silence: while watched, and in all."""

    watched_ping_s: float = 0.25
    idle_ping_s: float = 2.0
    watched_stuck_s: float = 0.6
    idle_stuck_s: float = 1.5
    watched_silence_s: float = 10.0
    idle_silence_s: float = 30.0


class PeerLink:
    """One connection as a `meshd.links.wire.Link`."""

    def __init__(
        self,
        transport: trio.abc.Stream,
        mux: Multiplexer,
        peer: NodeId,
        *,
        run_id: object = None,
        accept: Callable[[PeerStream], None],
        early: Iterable[Event] = (),
        timing: LinkTiming | None = None,
    ) -> None:
        self.run_id = run_id
        self.bulk_link: Callable[[], Awaitable[PeerLink]] | None = None
        self.when_stuck: Callable[[], None] = _nothing
        self._peer = peer
        self._transport = transport_of(transport)
        self.mux = mux  # also for this link's streams, as `room` is
        self._accept = accept
        self._early = list(early)
        self._timing = timing or LinkTiming()
        self._streams: dict[int, PeerStream] = {}
        self._last_heard = trio.current_time()
        self._rtt_ms: float | None = None
        self._pong: Mapping[str, Any] = {}
        self._watchers = 0
        self._dispatching = False
        self._silence_s = self._watched_silence_s = 0.0
        self._nonce = 0
        self._sent_at: dict[int, float] = {}
        self._goaway: str | None = None
        self._reason: str | None = None
        self._closed = trio.Event()
        self._scope = trio.CancelScope()
        self._output = trio.lowlevel.ParkingLot()  # the writer, while nothing is left over
        self.room = trio.lowlevel.ParkingLot()  # senders, while their stream has enough queued
        self._hurry = trio.lowlevel.ParkingLot()  # the pinger, until its next ping

    # --- what a holder of the link sees -------------------------------------------------------------------------------

    @property
    def peer(self) -> NodeId:
        return self._peer

    @property
    def last_heard(self) -> float:
        return self._last_heard

    @property
    def rtt_ms(self) -> float | None:
        return self._rtt_ms

    @property
    def pong(self) -> Mapping[str, Any]:
        return self._pong

    @property
    def usable(self) -> bool:
        """True while streams can be opened."""
        return self._reason is None and self._goaway is None

    def stuck(self, now: float) -> bool:
        """True when a ping is long overdue and nothing else came meanwhile. A connection that was cut waits for its next
        retransmission, which after a cut of seconds is seconds away; a new one has no such past."""
        oldest = min(self._sent_at.values(), default=now)
        limit_s = self._timing.watched_stuck_s if self._watchers else self._timing.idle_stuck_s
        return self.usable and now - max(oldest, self._last_heard) > limit_s

    @property
    def streams(self) -> int:
        """How many streams are alive, both ways."""
        return self.mux.streams

    @property
    def reason(self) -> str | None:
        """Why the link is gone; None while it lives."""
        return self._reason

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        self._watchers += 1
        self._hurry.unpark_all()
        try:
            yield
        finally:
            self._watchers -= 1

    async def open(self, first: Message, *, bulk: bool = False, last: bool = False) -> PeerStream:
        """``last``: nothing follows from this side, so that message and end travel together. Raises LinkLost, Busy (too many
        streams), ValueError (a message above a cap)."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if bulk and self.bulk_link is not None:
            return await (await self.bulk_link()).open(first, last=last)
        return self.start(first, last=last)

    def start(self, first: Message, *, last: bool = False) -> PeerStream:
        """`open` on this very connection, without a task's turn. Raises as it does."""
        self.check()
        stream = PeerStream(self, self.mux.open(first), None)
        self._streams[stream.id] = stream
        if last:
            stream.end_now()
        self.flush()
        return stream

    async def closed(self) -> str:
        await self._closed.wait()
        return self._reason or ""

    def close(self, reason: str) -> None:
        """Drop the connection now; every stream ends with LinkLost. The first reason stays."""
        if self._reason is None:
            self._reason = reason
            self._scope.cancel()

    async def drain(self, reason: str, *, grace_s: float) -> None:
        """Say GOAWAY, let running streams finish for ``grace_s``, and close."""
        self.mux.goaway(reason)
        self._goaway = self._goaway or reason
        self.flush()
        with trio.move_on_after(grace_s):
            while self._reason is None and (self.mux.streams or self.mux.has_output or self._transport.pending):
                await self.room.park()
        self.close(reason)

    def check(self) -> None:
        """Raises LinkLost when the link is gone or going."""
        if self._reason is not None or self._goaway is not None:
            raise LinkLost(f"the link to {self._peer[:8]} is gone: {self._reason or self._goaway}")

    # --- tasks --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the link until it is closed from either end. Does not raise for what a peer or the network does."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._keep_pinging)
        finally:
            self._reason = self._reason or "closed here"
            self._closed.set()
            lost = LinkLost(f"the link to {self._peer[:8]} is gone: {self._reason}")
            for stream in list(self._streams.values()):
                stream.break_off(lost)
            self._streams.clear()
            self.room.unpark_all()
            self.bulk_link, self.when_stuck = None, _nothing
            transport, self._transport = self._transport, ClosedTransport()
            await trio.aclose_forcefully(transport)

    async def _read(self) -> None:
        try:
            self._dispatch(self._early)
            self._early = []
            while True:
                self.flush()
                raw = await self._transport.receive_some(READ_BYTES)
                if not raw:
                    self.close(self._goaway or "closed by the peer")
                    return
                events = self.mux.receive_untrusted(raw)
                if not events or not all(isinstance(event, Pinged) for event in events):
                    self._last_heard = trio.current_time()
                    self._silence_s = self._watched_silence_s = 0.0
                self._dispatch(events)
        except BadFrame as error:
            self.close(f"bad frame: {error.message}")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.close(self._goaway or "reset")

    async def _write(self) -> None:
        """Wait for the transport where it took less than it was given."""
        try:
            while True:
                while self._transport.pending:
                    await self._transport.drain()
                    self.flush()
                self.room.unpark_all()
                await self._output.park()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.close(self._goaway or "reset")

    async def _keep_pinging(self) -> None:
        while True:
            self._ping()
            watched = self._watchers > 0
            interval_s = self._timing.watched_ping_s if watched else self._timing.idle_ping_s
            asked_at = trio.current_time()
            with trio.move_on_after(interval_s):
                await self._hurry.park()
            now = trio.current_time()
            self._bear(min(interval_s, now - asked_at), watched=watched)
            paused = now - asked_at >= 2 * interval_s  # this process: what came meanwhile is not read yet
            if self._watchers and not paused and self.stuck(now):
                self.when_stuck()

    def _bear(self, silence_s: float, *, watched: bool) -> None:
        """So long after a ping nothing came, as far as is known here: too long, and the link is closed."""
        timing = self._timing
        self._silence_s += silence_s
        self._watched_silence_s += silence_s if watched else 0.0
        if self._watched_silence_s > timing.watched_silence_s or self._silence_s > timing.idle_silence_s:
            self.close("silent")

    def _ping(self) -> None:
        self._nonce += 1
        self._sent_at[self._nonce] = trio.current_time()
        if len(self._sent_at) > PINGS_KEPT:
            del self._sent_at[self._nonce - 1]  # never the oldest: by that `stuck` tells
        self.mux.ping(self._nonce)
        self.flush()

    def flush(self) -> None:
        """Write what may go, as far as the transport takes it."""
        if self.mux.has_output and self._reason is None:
            self._push()
            self.prune()
            if self.room:
                self.room.unpark_all()

    def _push(self) -> None:
        try:
            while self.mux.has_output and not self._transport.pending:
                self._transport.write(self.mux.next_bytes())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.close(self._goaway or "reset")
        if self._transport.pending:
            self._output.unpark()

    # --- events -------------------------------------------------------------------------------------------------------

    def _dispatch(self, events: Iterable[Event]) -> None:
        self._dispatching = True
        for event in events:
            self._take(event)
        self._dispatching = False
        self.prune()

    def _take(self, event: Event) -> None:
        match event:
            case Opened(stream, inbound):
                opened = self._streams[stream] = PeerStream(self, stream, inbound)
                self._accept(opened)
            case Arrived(stream, inbound):
                if stream in self._streams:
                    self._streams[stream].arrive(inbound)
                else:
                    self.mux.consumed(stream, inbound)
            case Ended(stream) if stream in self._streams:
                self._streams[stream].finish()
            case Failed(stream, error) if stream in self._streams:
                self._streams[stream].break_off(error)
            case Cancelled(stream) if stream in self._streams:
                self._streams[stream].break_off(StreamCancelled(f"{self._peer[:8]} cancelled the stream"))
            case Pinged(nonce):
                self.mux.pong(nonce, {})
            case Ponged(nonce, state):
                self._ponged(nonce, state)
            case GoingAway(reason):
                self._goaway = reason
            case _:
                pass  # news of a stream that nobody here holds

    def _ponged(self, nonce: int, state: Mapping[str, Any]) -> None:
        sent_at = self._sent_at.get(nonce)
        self._sent_at = {later: at for later, at in self._sent_at.items() if later > nonce}
        if sent_at is not None:
            sample_ms = (trio.current_time() - sent_at) * 1000
            self._rtt_ms = sample_ms if self._rtt_ms is None else 0.75 * self._rtt_ms + 0.25 * sample_ms
        self._pong = state

    def prune(self) -> None:
        """Forget streams that both ends finished, once all that came on them is handed over."""
        if len(self._streams) > self.mux.streams and not self._dispatching:
            self._streams = {key: stream for key, stream in self._streams.items() if self.mux.is_live(key)}
            self.room.unpark_all()


def _nothing() -> None:
    """Nobody replaces this connection."""
