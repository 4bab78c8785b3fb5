"""Transports: what is written arrives whole and in order, however little the connection takes at once."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.identity.node_key import NodeKey
from meshd.links.tls import LinkTls, prove
from meshd.links.transport import SocketTransport, Transport, transport_of

RING = KeyRing((MeshKey(b"a key of 32 bytes for these tests"[:32]),))
LONG = bytes(range(256)) * (16 << 10)  # 4 MiB: more than a socket's buffers hold
Test = Callable[[Transport, Transport], Awaitable[None]]


async def plain() -> tuple[Transport, Transport]:
    one, two = trio.socket.socketpair()
    return transport_of(trio.SocketStream(one)), transport_of(trio.SocketStream(two))


async def memory() -> tuple[Transport, Transport]:
    one, two = trio.testing.memory_stream_pair()
    return transport_of(one), transport_of(two)


async def tls() -> tuple[Transport, Transport]:
    one, two = trio.socket.socketpair()
    dialler = LinkTls(NodeKey.generate(), RING).wrap(trio.SocketStream(one), dialler=True)
    acceptor = LinkTls(NodeKey.generate(), RING).wrap(trio.SocketStream(two), dialler=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(prove, dialler)
        nursery.start_soon(prove, acceptor)
    return dialler, acceptor


def over(make: Callable[[], Awaitable[tuple[Transport, Transport]]], test: Test) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            left, right = await make()
            async with left, right:
                await test(left, right)

    trio.run(bounded)


def waits(transport: Transport) -> bool:
    """Asked anew each time, which a type checker does not see of a property."""
    return transport.pending


async def read(transport: Transport, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = await transport.receive_some()
        assert more
        got += more
    return got


@pytest.mark.parametrize("make", [plain, memory, tls])
def test_what_the_connection_does_not_take_waits_for_the_drain(
    make: Callable[[], Awaitable[tuple[Transport, Transport]]],
) -> None:
    async def test(left: Transport, right: Transport) -> None:
        left.write(LONG)
        assert waits(left)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(left.drain)
            assert await read(right, len(LONG)) == LONG
        assert not waits(left)
        right.write(b"short")
        await right.drain()
        assert await read(left, 5) == b"short"

    over(make, test)


@pytest.mark.parametrize("make", [plain, tls])
def test_a_cancelled_drain_loses_nothing(make: Callable[[], Awaitable[tuple[Transport, Transport]]]) -> None:
    async def test(left: Transport, right: Transport) -> None:
        left.write(LONG)
        with trio.CancelScope() as scope:
            scope.cancel()
            await left.drain()
        assert waits(left)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(left.drain)
            assert await read(right, len(LONG)) == LONG

    over(make, test)


@pytest.mark.parametrize("make", [plain, tls])
def test_a_short_write_needs_no_drain(make: Callable[[], Awaitable[tuple[Transport, Transport]]]) -> None:
    async def test(left: Transport, right: Transport) -> None:
        left.write(b"now")
        assert not waits(left)
        assert await read(right, 3) == b"now"

    over(make, test)


def test_a_connection_that_ends_without_goodbye_is_broken_under_tls() -> None:
    async def test(left: Transport, right: Transport) -> None:
        await trio.aclose_forcefully(right)
        with pytest.raises(trio.BrokenResourceError):
            await left.receive_some()

    over(tls, test)


def test_a_closed_transport_is_closed_and_its_peer_sees_the_end() -> None:
    async def test(left: Transport, right: Transport) -> None:
        await left.aclose()
        with pytest.raises(trio.ClosedResourceError):
            left.write(b"x")
        assert await right.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError):
            right.write(b"x")

    over(plain, test)


def test_a_transport_is_its_own() -> None:
    async def test(left: Transport, _right: Transport) -> None:
        assert isinstance(left, SocketTransport)
        assert transport_of(left) is left

    over(plain, test)
