"""Both ends of a link as one state machine without I/O: bytes in, events out; messages in, bytes out.

Owns streams, credit and the order of frames. Knows no socket, clock, task or thread: a trio link drives it from its loop
(`peer_link.py`), an engine worker from a reader thread under its own lock.

Invariants: the dialler opens odd stream ids, the acceptor even ones, each in rising order; a stream's messages arrive whole
and in order; what a peer can make this end keep is bounded (streams, unread bytes, answers it does not fetch). Frames of a
stream that is already closed here are ignored: the peer could not know yet. Anything else out of place is BadFrame, and the
link should be closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from meshd.errors import BadFrame, Busy, LinkLost, MeshdError
from meshd.links.assemble import Assembler, Inbound
from meshd.links.fault import from_err, to_err
from meshd.links.flow import Outbox, ReceiveWindow
from meshd.links.frame import (
    MAX_BODY_BYTES,
    MAX_DATA_BYTES,
    Cancel,
    Data,
    End,
    Err,
    Frame,
    FrameDecoder,
    Goaway,
    Head,
    Ping,
    Pong,
    Window,
    cost_bytes,
    encode,
    message_frames,
)
from meshd.links.wire import Message

MAX_STREAMS: Final = 512
MAX_UNREAD_BYTES: Final = 4 * MAX_BODY_BYTES
MAX_UNFETCHED: Final = 4096
WRITE_BYTES: Final = MAX_DATA_BYTES
LAST_STREAM: Final = (1 << 32) - 2


@dataclass(frozen=True, slots=True)
class Opened:
    """The peer opened a stream with this message."""

    stream: int
    inbound: Inbound


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came on an open stream. Call `Multiplexer.consumed` when it has been read."""

    stream: int
    inbound: Inbound


@dataclass(frozen=True, slots=True)
class Ended:
    """The peer sends no more on this stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer ended the stream with an error."""

    stream: int
    error: MeshdError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The peer no longer reads this stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Pinged:
    """Answer with `Multiplexer.pong`."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Ponged:
    """The peer answered a ping."""

    nonce: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The peer takes no more streams on this link."""

    reason: str


# A stream can end (Ended, Failed, Cancelled) before its first message is whole: then it was never Opened.
Event = Opened | Arrived | Ended | Failed | Cancelled | Pinged | Ponged | GoingAway


@dataclass(slots=True)
class _State:
    """One live stream. ``announced``: the peer knows it; ``opened``: so does the owner of this end."""

    announced: bool
    opened: bool
    receiving: bool = True  # the peer has not ended its side
    sending: bool = True  # this end has not ended its side
    end_sent: bool = False  # and that END has been written
    window: ReceiveWindow = field(default_factory=ReceiveWindow)
    assembler: Assembler = field(default_factory=Assembler)


class Multiplexer:
    """One end of a link."""

    def __init__(self, *, dialler: bool) -> None:
        self._decoder = FrameDecoder()
        self._outbox = Outbox()
        self._streams: dict[int, _State] = {}
        self._next_own = 1 if dialler else 2
        self._last_theirs = 0 if dialler else -1
        self._unread_bytes = 0
        self._leaving = False
        self._peer_leaving: str | None = None

    # --- what this end sends ------------------------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """How many streams are alive."""
        return len(self._streams)

    def is_live(self, stream: int) -> bool:
        """True until both sides ended it or one broke it off."""
        return stream in self._streams

    def open(self, first: Message) -> int:
        """A new stream and its first message. Raises Busy, LinkLost (the peer is going away), ValueError (message too big)."""
        if self._peer_leaving is not None:
            raise LinkLost(f"the peer is going away: {self._peer_leaving}")
        if sum(self._is_own(stream) for stream in self._streams) >= MAX_STREAMS:
            raise Busy(f"{MAX_STREAMS} streams are open on one link")
        if self._next_own > LAST_STREAM:
            raise LinkLost("this link has used up its stream ids")
        frames = message_frames(self._next_own, first)
        stream = self._next_own
        self._next_own += 2
        self._streams[stream] = _State(announced=False, opened=True)
        self._outbox.open(stream)
        for frame in frames:
            self._outbox.push(frame)
        return stream

    def send(self, stream: int, message: Message) -> None:
        """Queue a message. On a stream that is gone it goes nowhere. Raises ValueError (message too big)."""
        frames = message_frames(stream, message)
        if self._sends(stream):
            for frame in frames:
                self._outbox.push(frame)

    def end(self, stream: int) -> None:
        """No more from this side; what is queued still goes."""
        if self._sends(stream):
            self._streams[stream].sending = False
            self._outbox.push(End(stream))

    def fail(self, stream: int, error: BaseException) -> None:
        """End the stream with an error, after what is queued; take nothing more from it."""
        if self._sends(stream):
            state = self._streams[stream]
            state.sending = False
            self._stop_receiving(state)
            self._outbox.push(to_err(stream, error))
        else:
            self.cancel(stream)

    def cancel(self, stream: int) -> None:
        """Break the stream off: nothing queued goes, the peer is told. A message on the wire is never torn in a frame."""
        state = self._streams.get(stream)
        if state is not None:
            self._forget(stream)
            if state.announced:
                self._outbox.control(Cancel(stream))

    def ping(self, nonce: int) -> None:
        self._outbox.control(Ping(nonce))

    def pong(self, nonce: int, state: Mapping[str, Any]) -> None:
        """Answer a ping. Raises ValueError for a state that may not travel, at once rather than in the writer."""
        pong = Pong(nonce, state)
        encode(pong)
        self._outbox.control(pong)

    def goaway(self, reason: str) -> None:
        """Take no more streams; those that run may finish."""
        self._leaving = True
        self._outbox.control(Goaway(reason))

    def queued_bytes(self, stream: int) -> int:
        """What a stream has not yet handed to `next_bytes`."""
        return self._outbox.queued_bytes(stream)

    @property
    def has_output(self) -> bool:
        """True when `next_bytes` would give some."""
        return bool(self._outbox)

    def next_bytes(self, limit_bytes: int = WRITE_BYTES) -> bytes:
        """Whole frames to write, about ``limit_bytes`` (at least one frame); empty when nothing may go now."""
        buffers: list[bytes | bytearray | memoryview] = []
        size = 0
        while size < limit_bytes:
            frame = self._outbox.pop()
            if frame is None:
                break
            for buffer in encode(frame):
                buffers.append(buffer)
                size += len(buffer)
            if not isinstance(frame, Data):
                self._sent(frame)
        return b"".join(buffers)

    def _sent(self, frame: Frame) -> None:
        match frame:
            case Head(stream):
                self._streams[stream].announced = True
            case End(stream):
                state = self._streams[stream]
                state.end_sent = True
                if not state.receiving:
                    self._forget(stream)
            case Err(stream):
                self._forget(stream)
            case _:
                pass

    def _sends(self, stream: int) -> bool:
        state = self._streams.get(stream)
        return state is not None and state.sending

    # --- what the peer sends ------------------------------------------------------------------------------------------

    def receive_untrusted(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """What ``data`` means. Raises only BadFrame: close the link."""
        events: list[Event] = []
        for frame in self._decoder.feed_untrusted(data):
            event = self._take_untrusted(frame)
            if event is not None:
                events.append(event)
        if self._outbox.control_waiting > MAX_UNFETCHED:
            raise BadFrame("the peer asks and does not read the answers")
        return events

    def consumed(self, stream: int, inbound: Inbound) -> None:
        """The message has been read, or will never be. Call it once for each `Inbound`, also when the stream is gone."""
        self._unread_bytes -= inbound.reserved_bytes
        state = self._streams.get(stream)
        if state is not None and state.receiving:
            self._give_back(stream, state, inbound.held_bytes)

    def _take_untrusted(self, frame: Frame) -> Event | None:  # noqa: PLR0911  # one return per frame type
        match frame:
            case Head() | Data():
                return self._content_untrusted(frame)
            case Window(stream, credit):
                self._outbox.grant(stream, credit)
                return None
            case End(stream):
                return self._end_untrusted(stream)
            case Cancel(stream):
                return Cancelled(stream) if self._forget(stream) else None
            case Err(stream):
                return Failed(stream, from_err(frame)) if self._forget(stream) else None
            case Ping(nonce):
                return Pinged(nonce)
            case Pong(nonce, state):
                return Ponged(nonce, state)
            case Goaway(reason):
                self._peer_leaving = reason
                return GoingAway(reason)

    def _content_untrusted(self, frame: Head | Data) -> Event | None:
        stream = frame.stream
        state = self._streams.get(stream)
        if state is None:
            state = self._accept_untrusted(frame)
        if state is None or not state.receiving:
            if state is not None and state.sending:
                raise BadFrame(f"content after the end of stream {stream}")
            return None
        cost = cost_bytes(frame)
        state.window.charge(cost)
        if isinstance(frame, Head) and not self._reserve(stream, frame):
            return Failed(stream, Busy("the peer sent more than this node will keep unread"))
        spare, inbound = state.assembler.add_untrusted(frame, cost)
        if spare:
            self._give_back(stream, state, spare)
        if inbound is None:
            return None
        if state.opened:
            return Arrived(stream, inbound)
        state.opened = True
        return Opened(stream, inbound)

    def _accept_untrusted(self, frame: Head | Data) -> _State | None:
        """The state of a stream the peer opens; None for one that is closed or refused."""
        stream = frame.stream
        if self._is_own(stream):
            if stream >= self._next_own:
                raise BadFrame(f"content on stream {stream}, which this end never opened")
            return None
        if stream <= self._last_theirs:
            return None
        if isinstance(frame, Data):
            raise BadFrame(f"DATA on stream {stream}, which never began")
        self._last_theirs = stream
        if self._leaving:
            self._outbox.control(to_err(stream, LinkLost("this node is leaving")))
            return None
        if sum(not self._is_own(other) for other in self._streams) >= MAX_STREAMS:
            self._outbox.control(to_err(stream, Busy(f"{MAX_STREAMS} streams are open on one link")))
            return None
        state = _State(announced=True, opened=False)
        self._streams[stream] = state
        self._outbox.open(stream)
        return state

    def _reserve(self, stream: int, head: Head) -> bool:
        if self._unread_bytes + head.body_bytes > MAX_UNREAD_BYTES:
            self._forget(stream)
            self._outbox.control(to_err(stream, Busy("too much is unread on this link")))
            return False
        self._unread_bytes += head.body_bytes
        return True

    def _end_untrusted(self, stream: int) -> Event | None:
        state = self._streams.get(stream)
        if state is None or not state.receiving:
            return None
        state.assembler.end_untrusted()
        state.receiving = False
        if state.end_sent:
            self._forget(stream)
        return Ended(stream)

    def _give_back(self, stream: int, state: _State, cost: int) -> None:
        credit = state.window.consume(cost)
        if credit:
            self._outbox.control(Window(stream, credit))

    def _stop_receiving(self, state: _State) -> None:
        state.receiving = False
        self._unread_bytes -= state.assembler.reserved_bytes
        state.assembler = Assembler()

    def _forget(self, stream: int) -> bool:
        """Drop a stream; False when it was gone already."""
        state = self._streams.pop(stream, None)
        if state is None:
            return False
        self._stop_receiving(state)
        self._outbox.close(stream)
        return True

    def _is_own(self, stream: int) -> bool:
        return stream % 2 == self._next_own % 2
