"""Credit and order of what a link sends: windows per stream, and which frame goes next.

Pure and unlocked: a trio link uses it from its loop, an engine worker under its own lock. Knows frames, not sockets.

Invariants: no stream sends more than it was granted; frames of one stream leave in the order they came; link-wide frames and
WINDOW go first, then small frames (a decode step), then bulk in turns of one frame per stream, and bulk gets every
`BULK_EVERY`-th turn however many small frames wait.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from meshd.errors import BadFrame
from meshd.links.frame import (
    HEAD_COST_BYTES,
    MAX_CREDIT_BYTES,
    MAX_HEAD_BYTES,
    Cancel,
    Data,
    End,
    Err,
    Frame,
    Goaway,
    Head,
    Ping,
    Pong,
    Window,
    cost_bytes,
)

STREAM_WINDOW_BYTES: Final = 1 << 20
"""Credit of a new stream, each way: 1 MiB keeps 100 Mbit full up to an 80 ms round trip."""

SMALL_BYTES: Final = MAX_HEAD_BYTES + HEAD_COST_BYTES
"""Every HEAD counts as small, so that streams reach the peer in the order in which they were opened."""

BULK_EVERY: Final = 8


class SendWindow:
    """What one stream may still send."""

    __slots__ = ("credit_bytes",)

    def __init__(self, credit_bytes: int = STREAM_WINDOW_BYTES) -> None:
        self.credit_bytes = credit_bytes

    def open_for(self, cost: int) -> bool:
        """True when ``cost`` may go. A window never opens wider than it started, and every frame fits that."""
        return cost <= self.credit_bytes

    def take(self, cost: int) -> None:
        self.credit_bytes -= cost

    def grant(self, credit: int) -> None:
        """The peer's WINDOW. Raises BadFrame when the sum is beyond reason."""
        if self.credit_bytes + credit > MAX_CREDIT_BYTES:
            raise BadFrame(f"a WINDOW that raises the credit to {self.credit_bytes + credit}")
        self.credit_bytes += credit


class ReceiveWindow:
    """What the peer may still send on one stream, and what was consumed but not yet told."""

    __slots__ = ("_consumed_bytes", "_left_bytes", "_size_bytes")

    def __init__(self, size_bytes: int = STREAM_WINDOW_BYTES) -> None:
        self._size_bytes = size_bytes
        self._left_bytes = size_bytes
        self._consumed_bytes = 0

    def charge(self, cost: int) -> None:
        """A frame arrived. Raises BadFrame when the peer had no credit for it."""
        if cost > self._left_bytes:
            raise BadFrame(f"{cost} bytes against a credit of {self._left_bytes}")
        self._left_bytes -= cost

    def consume(self, cost: int) -> int:
        """``cost`` has been read; the credit to send in a WINDOW now (0: not worth a frame yet)."""
        self._consumed_bytes += cost
        if self._consumed_bytes * 2 < self._size_bytes:
            return 0
        credit, self._consumed_bytes = self._consumed_bytes, 0
        self._left_bytes += credit
        return credit


class _Lane:
    """What one stream has to send."""

    __slots__ = ("frames", "queued_bytes", "window")

    def __init__(self) -> None:
        self.frames: deque[tuple[int, Head | Data | End | Err]] = deque()  # each with its cost
        self.window = SendWindow()
        self.queued_bytes = 0

    def next_cost(self) -> int | None:
        """The cost of the next frame if it may go now, else None."""
        if not self.frames:
            return None
        cost = self.frames[0][0]
        return cost if self.window.open_for(cost) else None


class Outbox:
    """Frames waiting to be written, and which is next."""

    __slots__ = ("_bulk", "_control", "_lanes", "_small", "_small_run")

    def __init__(self) -> None:
        self._control: deque[Ping | Pong | Goaway | Window | Cancel | Err] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._small: dict[int, None] = {}  # streams whose next frame is small and may go, in turn order
        self._bulk: dict[int, None] = {}
        self._small_run = 0

    def open(self, stream: int) -> None:
        """A stream may send from now on."""
        self._lanes[stream] = _Lane()

    def close(self, stream: int) -> None:
        """Forget a stream and whatever it had to send; unknown ones are ignored."""
        self._lanes.pop(stream, None)
        self._unlist(stream)

    def control(self, frame: Ping | Pong | Goaway | Window | Cancel | Err) -> None:
        """A frame that waits for no credit and no other frame."""
        self._control.append(frame)

    def push(self, frame: Head | Data | End | Err) -> None:
        """The stream's next frame; it goes after all its earlier ones. Raises KeyError for a stream that is not open."""
        lane = self._lanes[frame.stream]
        cost = cost_bytes(frame) if isinstance(frame, (Head, Data)) else 0
        lane.frames.append((cost, frame))
        lane.queued_bytes += cost
        if len(lane.frames) == 1:
            self._list(frame.stream, lane)

    def grant(self, stream: int, credit: int) -> None:
        """The peer's WINDOW; for a stream that is gone it means nothing. Raises BadFrame."""
        lane = self._lanes.get(stream)
        if lane is not None:
            lane.window.grant(credit)
            if stream not in self._small and stream not in self._bulk:
                self._list(stream, lane)

    def queued_bytes(self, stream: int) -> int:
        """What a stream has waiting, by cost; 0 for a stream that is gone."""
        lane = self._lanes.get(stream)
        return lane.queued_bytes if lane else 0

    @property
    def control_waiting(self) -> int:
        """How many link-wide frames wait: what a peer that asks and never reads would make grow."""
        return len(self._control)

    def __bool__(self) -> bool:
        """True when `pop` has a frame."""
        return bool(self._control or self._small or self._bulk)

    def pop(self) -> Frame | None:
        """The next frame to write, or None when nothing may go."""
        if self._control:
            return self._control.popleft()
        stream = self._turn()
        if stream is None:
            return None
        lane = self._lanes[stream]
        cost, frame = lane.frames.popleft()
        lane.window.take(cost)
        lane.queued_bytes -= cost
        self._unlist(stream)
        if lane.frames:
            self._list(stream, lane)
        return frame

    def _turn(self) -> int | None:
        if self._small and not (self._bulk and self._small_run >= BULK_EVERY):
            self._small_run += 1
            return next(iter(self._small))
        self._small_run = 0
        return next(iter(self._bulk), None)

    def _list(self, stream: int, lane: _Lane) -> None:
        cost = lane.next_cost()
        if cost is not None:
            (self._small if cost <= SMALL_BYTES else self._bulk)[stream] = None

    def _unlist(self, stream: int) -> None:
        self._small.pop(stream, None)
        self._bulk.pop(stream, None)
