"""Who may be at the other end of a connection: TLS, the hello, the block list, the owner's objections.

Invariants: nobody gets past without a proven (TLS) or at least claimed (plain) node id that is not barred, not our own, and the
one expected; a dialler says nothing of itself before the other end has proved to be whom it dialled. Without a mesh key
connections are plain: the caller keeps them on loopback or was told to. Deadlines are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final

import trio

from meshd.errors import MeshdError, WrongPeer
from meshd.links import tls
from meshd.links.hello import Greeting, node_id_untrusted
from meshd.vocabulary import Endpoint, NodeId

Hello = Mapping[str, Any]
MAIN: Final = "main"
BULK: Final = "bulk"


@dataclass(frozen=True, slots=True)
class Guest:
    """A greeted connection: who, what it said, what it is for, and the state its link goes on with."""

    node_id: NodeId
    hello: Hello
    role: str
    stream: trio.abc.Stream
    greeting: Greeting


class Doorkeeper:
    """``security`` may be replaced at any time: it counts for the next connection."""

    def __init__(
        self,
        node_id: NodeId,
        security: tls.LinkTls | None,
        *,
        say_hello: Callable[[], Hello],
        on_hello: Callable[[NodeId, Hello, Endpoint], None],
        barred: Container[NodeId],
    ) -> None:
        self.node_id = node_id
        self.security = security
        self._say_hello = say_hello
        self._on_hello = on_hello
        self._barred = barred

    async def welcome(self, transport: trio.SocketStream) -> Guest:
        """Greet a connection that came in. Raises LinkLost, WrongPeer, BadFrame, and what ``on_hello`` objects."""
        source = Endpoint(endpoint_of(transport.socket.getpeername()).host, 0)
        stream, proven = await self._secure(transport, dialler=False)
        greeting = Greeting(stream, dialler=False)
        theirs = await greeting.listen()
        try:
            node_id = self._check(theirs, proven, None, source)
        except MeshdError as error:
            await greeting.refuse(error)
            raise
        await greeting.answer(self._mine(MAIN))
        return Guest(node_id, theirs, BULK if theirs.get("role") == BULK else MAIN, stream, greeting)

    async def call(self, transport: trio.SocketStream, endpoint: Endpoint, expect: NodeId | None, role: str) -> Guest:
        """Greet a connection we made. Raises LinkLost, WrongPeer, and what ``on_hello`` objects."""
        stream, proven = await self._secure(transport, dialler=True)
        if proven is not None:
            self.admit(proven, expect)
        greeting = Greeting(stream, dialler=True)
        theirs = await greeting.ask(self._mine(role))
        return Guest(self._check(theirs, proven, expect, endpoint), theirs, role, stream, greeting)

    def admit(self, node_id: NodeId, expect: NodeId | None) -> None:
        """Raises WrongPeer for a node that may not be our peer, or not here."""
        if node_id == self.node_id:
            raise WrongPeer("that is this node itself")
        if node_id in self._barred:
            raise WrongPeer(f"{node_id[:8]} is on the block list")
        if expect is not None and node_id != expect:
            raise WrongPeer(f"{node_id[:8]} answers there, not {expect[:8]}")

    async def _secure(self, transport: trio.SocketStream, *, dialler: bool) -> tuple[trio.abc.Stream, NodeId | None]:
        if self.security is None:
            return transport, None
        stream = self.security.wrap(transport, dialler=dialler)
        return stream, await tls.prove(stream)

    def _mine(self, role: str) -> Hello:
        return {**self._say_hello(), "node_id": self.node_id, "role": role}

    def _check(self, theirs: Hello, proven: NodeId | None, expect: NodeId | None, source: Endpoint) -> NodeId:
        claimed = node_id_untrusted(theirs)
        if proven is not None and claimed != proven:
            raise WrongPeer(f"{proven[:8]} says it is {claimed[:8]}")
        if claimed == self.node_id:
            self._on_hello(claimed, theirs, source)  # ourselves, or a cloned disk: the owner can tell by the boot
        self.admit(claimed, expect)
        self._on_hello(claimed, theirs, source)
        return claimed


def endpoint_of(name: Any) -> Endpoint:
    """The endpoint of a socket name (two entries for IPv4, four for IPv6, none for other families)."""
    return Endpoint(str(name[0]), int(name[1])) if isinstance(name, tuple) else Endpoint("local", 0)
