"""What travels between peers, and between a daemon and its engine worker: messages on streams of one link.

A *link* is one framed, multiplexed, ordered byte stream to a peer (TLS over TCP, a plain loopback socket, or a socketpair).
A *stream* is one ordered exchange on it, both ways, with its own credit. A *message* is a small header map and a body of raw
bytes (tensor rows, ids, file parts), sent as a HEAD frame and DATA frames. The frame codec is in `frame.py`.

This file is the contract; `peer_link.py` implements it for trio, `inference/worker` for a thread, tests with fakes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshd.vocabulary import Endpoint, NodeId


@dataclass(frozen=True, slots=True)
class Message:
    """``kind`` selects the reader; ``head`` is msgpack plain data under 16 KiB; ``body`` is raw bytes."""

    kind: str
    head: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""


class Stream(Protocol):
    """One ordered exchange. Leaving it without `end` cancels it at the peer."""

    async def send(self, message: Message) -> None:
        """Queue and, under credit, write. Raises LinkLost, or the peer's error if it ended the stream with one."""
        ...

    def offer(self, message: Message) -> bool:
        """Send at once if that needs no waiting; False if it does, or cannot be: then `send` waits, or says why not."""
        ...

    async def receive(self) -> Message | None:
        """The next message; None after the peer's END. Raises LinkLost, or the error the peer ended with."""
        ...

    async def listen(self, take: Callable[[Message], None]) -> None:
        """Hand every message to ``take`` as it comes, without a task's turn between; returns after the peer's END. Raises as
        `receive`, and what ``take`` raises. It is the last to read: once it is over, cancelled too, what comes is dropped."""
        ...

    async def end(self) -> None:
        """No more from this side."""
        ...

    def cancel(self) -> None:
        """Tell the peer to stop; forget the stream. Never waits, never fails."""
        ...

    def fail(self, error: Exception) -> None:
        """End the stream at the peer with an error (code and message). Never waits, never fails."""
        ...


class Link(Protocol):
    """A live link to a proven peer."""

    @property
    def peer(self) -> NodeId: ...

    @property
    def last_heard(self) -> float:
        """trio's clock at the last byte from the peer that was not a ping."""
        ...

    @property
    def rtt_ms(self) -> float | None: ...

    @property
    def pong(self) -> Mapping[str, Any]:
        """What the peer's last PONG carried: an engine worker's state; empty from another node."""
        ...

    def watch(self) -> AbstractAsyncContextManager[None]:
        """While inside, PING every 250 ms instead of every 2 s."""
        ...

    async def open(self, first: Message, *, bulk: bool = False) -> Stream:
        """Start a stream with its first message. ``bulk`` uses the pair's second connection."""
        ...

    async def closed(self) -> str:
        """Wait until the link is gone; why."""
        ...


class Links(Protocol):
    """Every link of this node. Dials on demand, keeps links open, hands inbound streams to `serve`'s handler."""

    async def get(self, node_id: NodeId, *, deadline_s: float = 3.0) -> Link:
        """A live link, dialling the peer's known addresses if needed (3 s connect limit). Raises LinkLost, WrongPeer."""
        ...

    def live(self, node_id: NodeId) -> Link | None:
        """The link, if there is one now."""
        ...

    async def dial(self, endpoint: Endpoint, *, deadline_s: float = 3.0) -> Link:
        """Dial an address whose owner may not be known yet."""
        ...

    def inbound(self) -> AsyncIterator[tuple[NodeId, Message, Stream]]:
        """Streams that peers open: who, the first message, the stream."""
        ...
