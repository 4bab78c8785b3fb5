"""Pools over real loopback sockets: who gets in, who is dialled, what happens when they go."""

import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from meshd.errors import LinkLost, LocalError, PeerError, WrongPeer
from meshd.identity.block_list import BlockList
from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.identity.node_key import NodeKey
from meshd.links.peer_link import LinkTiming, PeerLink
from meshd.links.pool import LinkPool, PoolSettings, bound, listen
from meshd.links.tls import LinkTls
from meshd.links.transport import TlsTransport
from meshd.links.wire import Links, Message
from meshd.vocabulary import Endpoint, NodeId

KEYS = [NodeKey.generate() for _ in range(3)]
OLD, NEW = MeshKey(b"o" * 32), MeshKey(b"n" * 32)
RING = KeyRing((OLD,))
LOOPBACK = Endpoint("127.0.0.1", 0)


class Node:
    """A pool and what it told its owner. Knows its peers' addresses from ``book``."""

    def __init__(
        self,
        key: NodeKey,
        ring: KeyRing | None,
        book: dict[NodeId, Sequence[Endpoint]],
        *,
        barred: Container[NodeId] = frozenset(),
        settings: PoolSettings | None = None,
        refuse: Exception | None = None,
    ) -> None:
        self.node_id = key.node_id
        self.hellos: list[tuple[NodeId, Mapping[str, Any], Endpoint]] = []
        self.lost: list[tuple[NodeId, str]] = []
        self.refuse = refuse
        self.boot = b"boot"
        self.more: dict[str, Any] = {}
        self.endpoint = LOOPBACK
        self.pool = LinkPool(
            key.node_id,
            security=LinkTls(key, ring) if ring else None,
            say_hello=lambda: {"name": key.node_id[:4], "adverts": [b"opaque"], "boot": self.boot, **self.more},
            on_hello=self._hello,
            addresses=lambda node_id: book.get(node_id, ()),
            on_lost=lambda node_id, reason: self.lost.append((node_id, reason)),
            barred=barred,
            settings=settings,
        )

    def _hello(self, node_id: NodeId, hello: Mapping[str, Any], endpoint: Endpoint) -> None:
        self.hellos.append((node_id, hello, endpoint))
        if self.refuse is not None:
            raise self.refuse

    async def start(self, nursery: trio.Nursery, endpoint: Endpoint = LOOPBACK) -> None:
        listeners = await listen(endpoint)
        (self.endpoint,) = await nursery.start(self.pool.run, listeners)
        nursery.start_soon(self.serve)

    async def serve(self) -> None:
        async for _peer, first, stream in self.pool.inbound():
            with stream:
                await stream.send(first)
                await stream.end()


@asynccontextmanager
async def room(*nodes: Node, book: dict[NodeId, Sequence[Endpoint]] | None = None) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await node.start(nursery)
            if book is not None:
                book[node.node_id] = [node.endpoint]
        yield
        nursery.cancel_scope.cancel()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await test()

    trio.run(bounded)


async def ask(link: PeerLink, text: str = "hello", *, bulk: bool = False) -> None:
    with await link.open(Message(text), bulk=bulk) as stream:
        assert await stream.receive() == Message(text)
        await stream.end()
        assert await stream.receive() is None


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.sleep(0.005)


@pytest.mark.parametrize("ring", [RING, None])
def test_a_link_is_dialled_once_kept_and_used_both_ways(ring: KeyRing | None) -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], ring, book), Node(KEYS[1], ring, book)
        async with room(a, b, book=book):
            links: Links = a.pool
            assert links.live(b.node_id) is None
            link = await a.pool.get(b.node_id)
            await ask(link)
            assert await a.pool.get(b.node_id) is link
            await until(lambda: b.pool.live(a.node_id))
            await ask(await b.pool.get(a.node_id))
            assert (a.pool.connections, b.pool.connections) == (1, 1)
            assert [(who, hello["adverts"], where) for who, hello, where in a.hellos] == [
                (b.node_id, [b"opaque"], b.endpoint)
            ]
            assert [(who, hello["name"], where) for who, hello, where in b.hellos] == [
                (a.node_id, a.node_id[:4], Endpoint("127.0.0.1", 0))
            ]

    run(test)


def test_waiters_share_one_dial() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        async with room(a, b, book=book):
            found: list[PeerLink] = []

            async def get() -> None:
                found.append(await a.pool.get(b.node_id))

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(get)
            assert len({id(link) for link in found}) == 1
            assert a.pool.connections == 1

    run(test)


def test_simultaneous_dials_are_tolerated() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        async with room(a, b, book=book):

            async def use(pool: LinkPool, peer: NodeId) -> None:
                await ask(await pool.get(peer))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(use, a.pool, b.node_id)
                nursery.start_soon(use, b.pool, a.node_id)
            assert 1 <= a.pool.connections <= 2

    run(test)


def test_bulk_streams_get_a_connection_of_their_own() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        async with room(a, b, book=book):
            link = await a.pool.get(b.node_id)
            await ask(link, bulk=True)
            await ask(link, bulk=True)
            assert a.pool.connections == 2
            await until(lambda: b.pool.connections == 2)
            back = b.pool.live(a.node_id)
            assert back is not None
            await ask(back, bulk=True)
            assert b.pool.connections == 2
            assert a.pool.live(b.node_id) is link

    run(test)


def test_bulk_falls_back_to_the_main_link() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        async with room(a, b):
            link = await a.pool.dial(b.endpoint)
            await ask(link, bulk=True)
            assert a.pool.connections == 1

    run(test)


def test_the_node_answering_must_be_the_node_dialled() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        async with room(a, b):
            book[KEYS[2].node_id] = [b.endpoint]
            with pytest.raises(WrongPeer, match="answers there"):
                await a.pool.get(KEYS[2].node_id)
            assert b.hellos == []
            with pytest.raises(WrongPeer, match="this node itself"):
                await a.pool.dial(a.endpoint)
            with pytest.raises(WrongPeer):
                await a.pool.get(a.node_id)
            assert (await a.pool.dial(b.endpoint)).peer == b.node_id

    run(test)


class Liar(Node):
    """Says in its hello that it is somebody else."""

    def __init__(self, key: NodeKey, claimed: NodeId, ring: KeyRing | None) -> None:
        super().__init__(key, ring, {})
        self.pool._door.node_id = claimed


def test_a_hello_cannot_claim_another_identity_than_the_certificate() -> None:
    async def test() -> None:
        honest, liar = Node(KEYS[0], RING, {}), Liar(KEYS[1], KEYS[2].node_id, RING)
        async with room(honest, liar):
            with pytest.raises(WrongPeer, match="says it is"):
                await honest.pool.dial(liar.endpoint)
            with pytest.raises(WrongPeer, match="says it is"):
                await liar.pool.dial(honest.endpoint)
            assert honest.hellos == []

    run(test)


@pytest.mark.parametrize("dialler_bars", [True, False])
def test_a_barred_node_gets_no_link(tmp_path: Path, dialler_bars: bool) -> None:
    async def test() -> None:
        path = tmp_path / "blocked"
        a, b = (
            Node(KEYS[0], RING, {}, barred=BlockList(path)),
            Node(KEYS[1], RING, {}),
        )
        async with room(a, b):
            path.write_text(b.node_id)
            dialler, target = (a, b) if dialler_bars else (b, a)
            with pytest.raises(WrongPeer, match="block list"):
                await dialler.pool.dial(target.endpoint)
            path.write_text("")
            await ask(await dialler.pool.dial(target.endpoint))

    run(test)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (RING, KeyRing((NEW,)), "another mesh"),
        (RING, None, "without a mesh key|does not speak TLS"),
        (None, RING, "may use a mesh key|another mesh key"),
    ],
)
def test_another_mesh_is_refused_and_named(ours: KeyRing | None, theirs: KeyRing | None, words: str) -> None:
    async def test() -> None:
        a, b = Node(KEYS[0], ours, {}), Node(KEYS[1], theirs, {})
        async with room(a, b):
            with pytest.raises(PeerError, match=words):
                await a.pool.dial(b.endpoint)
            assert (a.hellos, b.hellos) == ([], [])
            assert b.pool.connections == 0

    run(test)


def test_a_dialler_of_another_mesh_is_told_that_its_certificate_is_refused() -> None:
    """The dialler accepts both meshes but shows a certificate of one that the other side does not know."""

    async def test() -> None:
        a, b = Node(KEYS[0], KeyRing((NEW, OLD)), {}), Node(KEYS[1], RING, {})
        async with room(a, b):
            with pytest.raises(LinkLost, match="another mesh key"):
                await a.pool.dial(b.endpoint)

    run(test)


def test_no_step_of_a_rotation_parts_neighbours_and_open_links_live_on() -> None:
    steps = [RING, RING.add(NEW), RING.add(NEW).use(), RING.add(NEW).use().drop()]

    async def test() -> None:
        a, b = Node(KEYS[0], RING, {}), Node(KEYS[1], RING, {})
        async with room(a, b):
            first = await a.pool.dial(b.endpoint)
            for ring in steps:
                for key, node in ((KEYS[0], a), (KEYS[1], b)):
                    node.pool.security = LinkTls(key, ring)
                    for dialler, target in ((a, b), (b, a)):
                        link = await dialler.pool.dial(target.endpoint)
                        await ask(link)
                        link.close("tried")
                        await link.closed()
            await ask(first)
        stranger, late = Node(KEYS[2], RING, {}), Node(KEYS[0], steps[-1], {})
        async with room(stranger, late):
            with pytest.raises(WrongPeer, match="another mesh"):
                await stranger.pool.dial(late.endpoint)

    run(test)


def test_an_objection_to_the_hello_reaches_the_dialler() -> None:
    async def test() -> None:
        a, b = Node(KEYS[0], RING, {}), Node(KEYS[1], RING, {}, refuse=LocalError("wire 9 is too new"))
        async with room(a, b):
            with pytest.raises(WrongPeer, match="wire 9 is too new"):
                await a.pool.dial(b.endpoint)
            assert b.pool.connections == 0

    run(test)


@pytest.mark.parametrize("dialler_fails", [True, False])
def test_a_fault_while_greeting_costs_that_link_only(dialler_fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        a, b = Node(KEYS[0], RING, {}), Node(KEYS[1], RING, {})
        async with room(a, b):
            faulty = a if dialler_fails else b
            faulty.refuse = KeyError("a bug")
            with pytest.raises(LinkLost):
                await a.pool.dial(b.endpoint)
            assert "a bug" in caplog.text
            faulty.refuse = None
            await ask(await a.pool.dial(b.endpoint))
            a.more = {"adverts": [bytes(1000)] * 20}
            with pytest.raises(LinkLost, match="own hello"):
                await a.pool.dial(b.endpoint)

    run(test)


def test_a_new_run_of_a_peer_closes_the_links_of_the_old_one() -> None:
    """The old process moved or died without a word: its connection looks alive, and nothing may be sent there any more."""

    async def test() -> None:
        old, new, here = Node(KEYS[0], RING, {}), Node(KEYS[0], RING, {}), Node(KEYS[1], RING, {})
        new.boot = b"next"
        async with room(old, new, here):
            stale = await here.pool.dial(old.endpoint)
            fresh = await new.pool.dial(here.endpoint)
            assert await stale.closed() == "the peer restarted"
            live = here.pool.live(KEYS[0].node_id)
            assert live is not None
            await ask(live)
            await ask(fresh)
            assert here.lost == []

    run(test)


def test_the_last_link_lost_is_told_once_with_the_reason() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        async with room(a, b, book=book):
            await a.pool.dial(b.endpoint)
            await a.pool.dial(b.endpoint)
            await until(lambda: b.pool.connections == 2)
            b.pool.close(a.node_id)
            await until(lambda: a.lost)
            await until(lambda: a.pool.connections == 0)
            assert [node_id for node_id, _reason in a.lost] == [b.node_id]
            assert a.lost[0][1] in ("closed by the peer", "reset")
            assert b.lost == []
            await ask(await a.pool.get(b.node_id))

    run(test)


def test_what_is_left_of_a_lost_link_holds_no_tls() -> None:
    """Its errors and their frames hold a link until cycles are collected, which may be minutes."""
    book: dict[NodeId, Sequence[Endpoint]] = {}
    a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)

    def connections() -> int:
        return sum(type(one) is TlsTransport for one in gc.get_objects())  # others' objects may mind being asked more

    async def test() -> None:
        before = connections()
        async with room(a, b, book=book):
            link = await a.pool.get(b.node_id)
            stream = await link.open(Message("hello"))
            assert connections() == before + 2
            link.close("enough")
            await link.closed()
            with pytest.raises(LinkLost) as caught:
                await stream.send(Message("more"))
            await until(lambda: b.lost)
            assert caught.value.__traceback__ is not None
            assert connections() == before

    gc.collect()
    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()


def test_a_dead_address_costs_a_head_start_and_a_dead_node_an_error() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        async with room(a, b):
            with socket.socket() as mute:
                mute.bind(("127.0.0.1", 0))
                mute.listen(0)
                dead = Endpoint("127.0.0.1", mute.getsockname()[1])
                book[b.node_id] = [dead, b.endpoint]
                await ask(await a.pool.get(b.node_id))
                book[KEYS[2].node_id] = [dead]
                with pytest.raises(LinkLost, match=r"within 0.1 s"):
                    await a.pool.get(KEYS[2].node_id, deadline_s=0.1)
            with pytest.raises(LinkLost, match="no address"):
                await a.pool.get(NodeId("0" * 32))

    run(test)


def test_backing_off_ends_with_a_sign_of_life() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            book[b.node_id] = [Endpoint("127.0.0.1", closed.getsockname()[1])]
            async with room(a, b):
                with pytest.raises(LinkLost, match=str(book[b.node_id][0])):
                    await a.pool.get(b.node_id)
                with pytest.raises(LinkLost, match="next try in"):
                    await a.pool.get(b.node_id)
                a.pool.heard(b.node_id)
                with pytest.raises(LinkLost) as caught:
                    await a.pool.get(b.node_id)
                assert "next try" not in caught.value.message
                book[b.node_id] = [b.endpoint]
                await ask(await a.pool.get(b.node_id))

    run(test)


def test_strangers_that_say_nothing_or_nonsense_are_dropped() -> None:
    async def test() -> None:
        settings = PoolSettings(greet_s=0.2, max_greeting=2)
        a, b = Node(KEYS[0], RING, {}, settings=settings), Node(KEYS[1], RING, {})
        async with room(a, b):
            mute = [await trio.open_tcp_stream("127.0.0.1", a.endpoint.port) for _ in range(4)]
            for stream in mute:
                assert await _rest(stream) == b""
            for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x16\x03\x01\x00\x05hello"):
                stream = await trio.open_tcp_stream("127.0.0.1", a.endpoint.port)
                await stream.send_all(noise)
                await _rest(stream)
            await ask(await b.pool.dial(a.endpoint))

    run(test)


async def _rest(stream: trio.SocketStream) -> bytes:
    got = b""
    async with stream:
        try:
            while raw := await stream.receive_some():
                got += raw
        except trio.BrokenResourceError:
            pass
    return got


def test_a_pair_keeps_a_bounded_number_of_connections() -> None:
    async def test() -> None:
        a, b = Node(KEYS[0], RING, {}), Node(KEYS[1], RING, {})
        async with room(a, b):
            for _ in range(10):
                await ask(await a.pool.dial(b.endpoint))
            await until(lambda: a.pool.connections <= PoolSettings().max_per_pair)
            link = a.pool.live(b.node_id)
            assert link is not None
            await ask(link)
            assert a.lost == []

    run(test)


def test_draining_closes_politely_and_takes_no_more() -> None:
    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        a, b = Node(KEYS[0], RING, book), Node(KEYS[1], RING, book)
        async with room(a, b, book=book):
            await ask(await a.pool.get(b.node_id))
            await b.pool.drain("leaving")
            await until(lambda: a.lost)
            assert a.lost == [(b.node_id, "leaving")]
            assert b.lost == []
            with pytest.raises(LinkLost):
                await a.pool.get(b.node_id)
            with pytest.raises(LinkLost, match="closed"):
                await b.pool.dial(a.endpoint)

    run(test)


def test_ipv6_loopback() -> None:
    async def test() -> None:
        a, b = Node(KEYS[0], RING, {}), Node(KEYS[1], RING, {})
        async with trio.open_nursery() as nursery:
            for node in (a, b):
                await node.start(nursery, Endpoint("::1", 0))
            assert str(a.endpoint).startswith("[::1]:")
            await ask(await b.pool.dial(Endpoint.parse(str(a.endpoint))))
            assert a.hellos[0][2] == Endpoint("::1", 0)
            nursery.cancel_scope.cancel()

    run(test)


def test_a_port_in_use_names_address_port_and_flag() -> None:
    async def test() -> None:
        listeners = await listen(LOOPBACK)
        (taken,) = bound(listeners)
        with pytest.raises(LocalError, match=f"{taken} is in use .*--mesh"):
            await listen(taken)
        with pytest.raises(LocalError, match="cannot be used"):
            await listen(Endpoint("192.0.2.1", 0))
        for listener in listeners:
            await listener.aclose()

    run(test)


class Way:
    """A way to a node that can lose what is on it: open connections hang, new ones pass."""

    def __init__(self, to: Endpoint) -> None:
        self.to = to
        self.cuts = 0

    async def run(self, *, task_status: trio.TaskStatus[list[trio.SocketListener]]) -> None:
        await trio.serve_tcp(self.carry, 0, host="127.0.0.1", task_status=task_status)

    async def carry(self, near: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream(self.to.host, self.to.port) as far, trio.open_nursery() as nursery:
            nursery.start_soon(self.pump, near, far, self.cuts)
            nursery.start_soon(self.pump, far, near, self.cuts)

    async def pump(self, source: trio.SocketStream, target: trio.SocketStream, cuts: int) -> None:
        with suppress(trio.BrokenResourceError):
            async for data in source:
                if self.cuts > cuts:
                    await trio.sleep_forever()
                await target.send_all(data)


@pytest.mark.parametrize("who", ["gossip", "caller", "watcher"])
def test_a_connection_that_hangs_is_replaced(who: str) -> None:
    """After a cut the old connection waits for its retransmission; a datagram from the peer, a caller, or whoever watches it
    tries a new one."""

    async def test() -> None:
        book: dict[NodeId, Sequence[Endpoint]] = {}
        timing = LinkTiming(idle_ping_s=0.05, idle_stuck_s=0.2, watched_ping_s=0.05, watched_stuck_s=0.2)
        quick = PoolSettings(timing=timing, fresh_wait_s=5.0)
        a, b = Node(KEYS[0], None, book, settings=quick), Node(KEYS[1], None, book)
        async with room(a, b), trio.open_nursery() as nursery:
            way = Way(b.endpoint)
            (listener,) = await nursery.start(way.run)
            book[b.node_id] = [Endpoint("127.0.0.1", listener.socket.getsockname()[1])]
            old = await a.pool.get(b.node_id)
            await ask(old)
            a.pool.heard(b.node_id)
            assert await a.pool.get(b.node_id) is old  # it answers
            way.cuts += 1
            if who == "watcher":
                async with old.watch():
                    await old.closed()
            await until(lambda: old.stuck(trio.current_time()) or old.reason is not None)
            if who == "gossip":
                a.pool.heard(b.node_id)
                await until(lambda: a.pool.live(b.node_id) is not old)
            new = await a.pool.get(b.node_id)
            assert new is not old
            await ask(new)
            assert await old.closed() == "a newer connection answers"
            assert not a.lost
            nursery.cancel_scope.cancel()

    run(test)
