"""Links in memory: a net that can delay, cut, freeze and kill, for shells that speak `meshd.links.wire`.

Time is trio's, so under a `MockClock` a second costs nothing. A killed node's links end at once for everybody; a frozen one
keeps its links and is silent: what is sent to it, and what it sends, waits for the thaw. ``sent`` counts messages by (from,
to, kind).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio

from meshd.errors import LinkLost, PeerError
from meshd.links.wire import Message
from meshd.vocabulary import Endpoint, NodeId

Inbound = tuple[NodeId, Message, "FakeStream"]


class FakeNet:
    def __init__(self, *, latency_s: float = 0.0005) -> None:
        self.latency_s = latency_s
        self.sent: Counter[tuple[NodeId, NodeId, str]] = Counter()
        self.log: list[tuple[NodeId, NodeId, Message]] = []
        self._up: dict[NodeId, FakeLinks] = {}
        self._frozen: dict[NodeId, float] = {}
        self._cut: set[frozenset[NodeId]] = set()
        self._forbidden: set[tuple[NodeId, NodeId]] = set()
        self._changed = trio.Event()
        self._links: dict[tuple[NodeId, NodeId], FakeLink] = {}

    def join(self, node: NodeId) -> FakeLinks:
        """A node's links; joining again is a restart."""
        links = self._up[node] = FakeLinks(self, node)
        return links

    def kill(self, node: NodeId) -> None:
        """SIGKILL: every link of it is reset."""
        self._up.pop(node, None)
        self._frozen.pop(node, None)
        for pair in [pair for pair in self._links if node in pair]:
            self._links.pop(pair).reset("connection reset")
        self._change()

    def freeze(self, node: NodeId) -> None:
        """SIGSTOP."""
        self._frozen[node] = trio.current_time()

    def thaw(self, node: NodeId) -> None:
        self._frozen.pop(node, None)
        self._change()

    def cut(self, a: NodeId, b: NodeId) -> None:
        """Nothing passes between the two, and nobody is told."""
        self._cut.add(frozenset((a, b)))

    def mend(self, a: NodeId, b: NodeId) -> None:
        self._cut.discard(frozenset((a, b)))
        self._change()

    def forbid(self, a: NodeId, b: NodeId) -> None:
        """a cannot dial b (a firewall); b may dial a."""
        self._forbidden.add((a, b))

    def may_dial(self, a: NodeId, b: NodeId) -> bool:
        return (a, b) not in self._forbidden

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def open_between(self, a: NodeId, b: NodeId) -> bool:
        return not self._frozen.keys() & {a, b} and frozenset((a, b)) not in self._cut

    async def pass_between(self, a: NodeId, b: NodeId) -> None:
        """Wait for the way to be open."""
        await trio.sleep(self.latency_s)
        while not self.open_between(a, b):
            await self._changed.wait()

    def last_heard(self, of: NodeId) -> float:
        return self._frozen.get(of, trio.current_time())

    def peer(self, node: NodeId) -> FakeLinks | None:
        return self._up.get(node)

    def link(self, a: NodeId, b: NodeId) -> FakeLink | None:
        return self._links.get((a, b))

    def connect(self, a: NodeId, b: NodeId) -> FakeLink:
        if (a, b) not in self._links:
            self._links[a, b] = FakeLink(self, a, b)
            self._links[b, a] = FakeLink(self, b, a)
        return self._links[a, b]


class FakeLinks:
    """`meshd.links.wire.Links` of one node."""

    def __init__(self, net: FakeNet, self_id: NodeId) -> None:
        self._net = net
        self.self_id = self_id
        self._put, self._take = trio.open_memory_channel[Inbound](1024)

    async def get(self, node_id: NodeId, *, deadline_s: float = 3.0) -> FakeLink:
        with trio.move_on_after(deadline_s):
            await self._net.pass_between(self.self_id, node_id)
            known = self._net.link(self.self_id, node_id)
            if self._net.peer(node_id) is None or not (known or self._net.may_dial(self.self_id, node_id)):
                raise LinkLost(f"{node_id} refused the connection")
            return self._net.connect(self.self_id, node_id)
        raise LinkLost(f"{node_id} did not answer within {deadline_s} s")

    def live(self, node_id: NodeId) -> FakeLink | None:
        return self._net.link(self.self_id, node_id)

    async def dial(self, endpoint: Endpoint, *, expect: NodeId | None = None, deadline_s: float = 3.0) -> FakeLink:
        if expect is None:
            raise LinkLost(f"nobody answers at {endpoint}")
        return await self.get(expect, deadline_s=deadline_s)

    async def inbound(self) -> AsyncIterator[Inbound]:
        async for item in self._take:
            yield item

    def accept(self, item: Inbound) -> None:
        self._put.send_nowait(item)


class FakeLink:
    """One end of a pair's link."""

    def __init__(self, net: FakeNet, here: NodeId, there: NodeId) -> None:
        self._net = net
        self._here = here
        self._there = there
        self._gone = trio.Event()
        self._why = ""
        self._streams: list[FakeStream] = []

    @property
    def peer(self) -> NodeId:
        return self._there

    @property
    def last_heard(self) -> float:
        return self._net.last_heard(self._there)

    @property
    def rtt_ms(self) -> float | None:
        return self._net.latency_s * 2000.0

    @property
    def pong(self) -> Mapping[str, Any]:
        return {}

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        yield

    def watch(self) -> AbstractAsyncContextManager[None]:
        return self._watching()

    async def open(self, first: Message, *, bulk: bool = False) -> FakeStream:
        if self._gone.is_set():
            raise LinkLost(self._why)
        near, far = FakeStream.pair(self._net, self._here, self._there)
        other = self._net.link(self._there, self._here)
        peer = self._net.peer(self._there)
        if other is None or peer is None:
            raise LinkLost(f"{self._there} is gone")
        self._streams.append(near)
        other._streams.append(far)
        await near.note(first)
        if self._gone.is_set():
            raise LinkLost(self._why)
        peer.accept((self._here, first, far))
        return near

    async def closed(self) -> str:
        await self._gone.wait()
        return self._why

    def reset(self, why: str) -> None:
        self._why = why
        self._gone.set()
        for stream in self._streams:
            stream.break_with(LinkLost(why))


class FakeStream:
    """One end of a stream; ``pair`` makes both."""

    def __init__(self, net: FakeNet, here: NodeId, there: NodeId) -> None:
        self._net = net
        self._here = here
        self._there = there
        self._put, self._take = trio.open_memory_channel[Message | Exception | None](4096)
        self._other: FakeStream | None = None
        self._broken: Exception | None = None
        self._lock = trio.StrictFIFOLock()

    @classmethod
    def pair(cls, net: FakeNet, a: NodeId, b: NodeId) -> tuple[FakeStream, FakeStream]:
        near, far = cls(net, a, b), cls(net, b, a)
        near._other, far._other = far, near
        return near, far

    async def note(self, message: Message) -> None:
        """Count the message and let it travel."""
        self._net.sent[self._here, self._there, message.kind] += 1
        self._net.log.append((self._here, self._there, message))
        await self._net.pass_between(self._here, self._there)

    async def send(self, message: Message) -> None:
        async with self._lock:
            if self._broken:
                raise self._broken
            await self.note(message)
            if self._broken:
                raise self._broken
            self._give(message)

    def offer(self, message: Message) -> bool:
        """Everything takes time here."""
        return False

    async def receive(self) -> Message | None:
        item = await self._take.receive()
        if isinstance(item, Exception):
            raise item
        return item

    async def listen(self, take: Callable[[Message], None]) -> None:
        while (message := await self.receive()) is not None:
            take(message)

    async def end(self) -> None:
        async with self._lock:
            await self._net.pass_between(self._here, self._there)
            if self._broken is None:
                self._give(None)

    def cancel(self) -> None:
        self._give(PeerError("the stream was cancelled"))

    def fail(self, error: Exception) -> None:
        self._give(error)

    def break_with(self, error: Exception) -> None:
        self._broken = error
        self._put.send_nowait(error)

    def _give(self, item: Message | Exception | None) -> None:
        if self._other is not None and self._other._broken is None:
            self._other._put.send_nowait(item)
