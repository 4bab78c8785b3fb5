"""HEAD and DATA frames of one stream become messages.

Pure. Owns the order within a stream (a HEAD, exactly its DATA, the next HEAD or END) and which part of a message's credit
goes back to the sender at once and which when somebody has read it. A body is kept as it arrives, never allocated by its
declared size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshd.errors import BadFrame
from meshd.links.flow import STREAM_WINDOW_BYTES
from meshd.links.frame import Data, Head
from meshd.links.wire import Message

HELD_BYTES: Final = STREAM_WINDOW_BYTES // 4
"""A message withholds at most this much credit until it is read. A quarter: with less than half a window consumed but not
yet told to the sender, the rest still takes the longest frame, so a long body never waits for its own reader."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """A message that arrived; ``held_bytes`` of credit go back when it is read, ``reserved_bytes`` of the link's budget."""

    message: Message
    held_bytes: int
    reserved_bytes: int


class Assembler:
    """The inbound side of one stream."""

    __slots__ = ("_held_bytes", "_missing_bytes", "_open", "_parts")

    def __init__(self) -> None:
        self._open: Head | None = None
        self._parts: list[bytes] = []
        self._missing_bytes = 0
        self._held_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """The declared body of the message in progress."""
        return self._open.body_bytes if self._open else 0

    def add_untrusted(self, frame: Head | Data, cost: int) -> tuple[int, Inbound | None]:
        """The credit that may go back at once, and the message this frame completes. Raises only BadFrame."""
        if isinstance(frame, Head):
            if self._open is not None:
                raise BadFrame(f"a message begins before {self._missing_bytes} bytes of the last one came")
            self._open, self._parts, self._missing_bytes, self._held_bytes = frame, [], frame.body_bytes, cost
            spare = 0
        else:
            if self._open is None or len(frame.payload) > self._missing_bytes:
                raise BadFrame("more DATA than the message declared")
            self._parts.append(bytes(frame.payload))
            self._missing_bytes -= len(frame.payload)
            spare = max(0, self._held_bytes + cost - HELD_BYTES)
            self._held_bytes += cost - spare
        return spare, None if self._missing_bytes else self._complete(self._open)

    def end_untrusted(self) -> None:
        """The peer's END. Raises BadFrame when it tears a message."""
        if self._open is not None:
            raise BadFrame(f"a stream ends before {self._missing_bytes} bytes of its message came")

    def _complete(self, head: Head) -> Inbound:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        done = Inbound(Message(head.kind, head.head, body), self._held_bytes, head.body_bytes)
        self._open, self._parts = None, []
        return done
