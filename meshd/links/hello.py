"""The first exchange on a connection: who is there. Afterwards the connection is a link.

The dialler opens stream 1 with a ``hello`` message, the acceptor answers on it; either may refuse with an error instead. Runs
on the bare stream, before the link's tasks: the caller sets the deadline. Events that came with the answer are handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import trio

from meshd.errors import BadFrame, LinkLost, MeshdError, WrongPeer
from meshd.links.multiplex import Arrived, Event, Failed, Multiplexer, Opened
from meshd.links.tls import explain
from meshd.links.wire import Message
from meshd.vocabulary import NodeId, is_node_id

KIND: Final = "hello"
READ_BYTES: Final = 64 << 10


class Greeting:
    """One end of the exchange. Use `ask` (dialler), or `listen` and then `answer` or `refuse` (acceptor)."""

    def __init__(self, stream: trio.abc.Stream, *, dialler: bool) -> None:
        self.mux = Multiplexer(dialler=dialler)
        self.early: list[Event] = []
        self._stream = stream
        self._id = 0

    async def ask(self, mine: Mapping[str, Any]) -> Mapping[str, Any]:
        """The acceptor's hello. Raises LinkLost, WrongPeer (refused, or no link at all).

        In TLS 1.3 a dialler has finished its handshake before the acceptor looks at its certificate, so a refused
        certificate shows only here, and only as a closed connection.
        """
        with _own_hello():
            self._id = self.mux.open(Message(KIND, mine))
        self.mux.end(self._id)
        try:
            await self._flush()
            return (await self._hello()).head
        except LinkLost as error:
            raise LinkLost("closed before its hello; it is stopping or full, or has another mesh key") from error
        except BadFrame as error:
            raise WrongPeer(f"what answers speaks no plain link ({error.message}); it may use a mesh key") from error

    async def listen(self) -> Mapping[str, Any]:
        """The dialler's hello. Raises LinkLost, BadFrame."""
        return (await self._hello()).head

    async def answer(self, mine: Mapping[str, Any]) -> None:
        """Accept. Raises LinkLost."""
        with _own_hello():
            self.mux.send(self._id, Message(KIND, mine))
        self.mux.end(self._id)
        await self._flush()

    async def refuse(self, error: MeshdError) -> None:
        """Say why not. Raises LinkLost."""
        self.mux.fail(self._id, error)
        await self._flush()

    async def _flush(self) -> None:
        try:
            while raw := self.mux.next_bytes():
                await self._stream.send_all(raw)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise explain(error) from error

    async def _hello(self) -> Message:
        found: Message | None = None
        while found is None:
            try:
                raw = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise explain(error) from error
            if not raw:
                raise LinkLost("the connection closed before a hello")
            for event in self.mux.receive_untrusted(raw):
                if found is None:
                    found = self._look(event)
                else:
                    self.early.append(event)
        return found

    def _look(self, event: Event) -> Message | None:
        match event:
            case Opened(stream, inbound) | Arrived(stream, inbound) if inbound.message.kind == KIND:
                self._id = stream
                self.mux.consumed(stream, inbound)
                return inbound.message
            case Failed(_, error):
                raise WrongPeer(f"refused: {error.message}")
            case Opened() | Arrived():
                raise BadFrame("a link that does not begin with a hello")
            case _:
                return None


@contextmanager
def _own_hello() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise LinkLost(f"this node's own hello cannot be sent: {error}") from error


def node_id_untrusted(hello: Mapping[str, Any]) -> NodeId:
    """The node id a hello claims. Raises BadFrame."""
    claimed = hello.get("node_id")
    if not isinstance(claimed, str) or not is_node_id(claimed):
        raise BadFrame("a hello without a node id")
    return NodeId(claimed)
