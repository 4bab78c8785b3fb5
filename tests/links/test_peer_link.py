"""A link over a stream: streams, errors, cancellation, backpressure, pings and silence."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from meshd.errors import LinkLost, NeedRows, StreamCancelled
from meshd.links.frame import MAX_BODY_BYTES
from meshd.links.multiplex import Multiplexer, Pinged
from meshd.links.peer_link import PeerLink
from meshd.links.peer_stream import PeerStream
from meshd.links.wire import Link, Message, Stream
from meshd.vocabulary import NodeId

A, B = NodeId("a" * 32), NodeId("b" * 32)
Handler = Callable[[PeerStream], Awaitable[None]]


async def ignore(_stream: PeerStream) -> None:
    return


class Ends:
    """A dialling end, an accepting end, and a handler for what the dialling end opens."""

    def __init__(self, nursery: trio.Nursery, left: trio.abc.Stream, right: trio.abc.Stream, handler: Handler) -> None:
        def serve(stream: PeerStream) -> None:
            nursery.start_soon(handler, stream)

        self.dialler = PeerLink(left, Multiplexer(dialler=True), B, accept=serve)
        self.acceptor = PeerLink(right, Multiplexer(dialler=False), A, accept=serve)
        nursery.start_soon(self.dialler.run)
        nursery.start_soon(self.acceptor.run)


@asynccontextmanager
async def ends(handler: Handler = ignore, *, memory: bool = True) -> AsyncIterator[Ends]:
    left: trio.abc.Stream
    right: trio.abc.Stream
    if memory:
        left, right = trio.testing.memory_stream_pair()
    else:
        one, two = trio.socket.socketpair()
        left, right = trio.SocketStream(one), trio.SocketStream(two)
    async with trio.open_nursery() as nursery:
        yield Ends(nursery, left, right, handler)
        nursery.cancel_scope.cancel()


async def echo(stream: PeerStream) -> None:
    with contextlib.suppress(StreamCancelled), stream:
        message: Message | None = stream.first()
        while message is not None:
            await stream.send(message)
            message = await stream.receive()
        await stream.end()


def run(test: Callable[[], Awaitable[None]], *, mock_clock: bool = False) -> None:
    async def bounded() -> None:
        with trio.fail_after(1e6 if mock_clock else 30):
            await test()

    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0) if mock_clock else None)


@pytest.mark.parametrize("memory", [True, False])
def test_messages_go_and_come_back(memory: bool) -> None:
    async def test() -> None:
        async with ends(echo, memory=memory) as pair:
            link: Link = pair.dialler
            stream: Stream = await link.open(Message("first", {"n": 0}))
            bodies = [b"", b"x", b"y" * 100_000, b"z" * 3_000_000]
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    for body in bodies:
                        await stream.send(Message("next", {}, body))
                    await stream.end()

                nursery.start_soon(send)
                got = []
                while (message := await stream.receive()) is not None:
                    got.append(message.body)
            assert got == [b"", *bodies]
            assert await stream.receive() is None
            await trio.testing.wait_all_tasks_blocked()
            assert pair.dialler.streams == pair.acceptor.streams == 0

    run(test)


def test_an_answer_queued_before_leaving_still_arrives() -> None:
    async def answer(stream: PeerStream) -> None:
        with stream:
            await stream.send(Message("answer", {}, bytes(2 << 20)))
            await stream.end()

    async def test() -> None:
        async with ends(answer) as pair:
            with await pair.dialler.open(Message("ask")) as stream:
                message = await stream.receive()
                assert message is not None
                assert len(message.body) == 2 << 20
                assert await stream.receive() is None
                await stream.end()
            await trio.testing.wait_all_tasks_blocked()
            assert pair.dialler.streams == pair.acceptor.streams == 0

    run(test)


def test_errors_come_back_as_their_class_after_what_was_sent() -> None:
    async def refuse(stream: PeerStream) -> None:
        await stream.send(Message("part"))
        stream.fail(NeedRows(9))

    async def test() -> None:
        async with ends(refuse) as pair:
            stream = await pair.dialler.open(Message("step"))
            assert await stream.receive() == Message("part")
            with pytest.raises(NeedRows) as caught:
                await stream.receive()
            assert caught.value.have == 9
            with pytest.raises(NeedRows):
                await stream.send(Message("more"))

    run(test)


@pytest.mark.parametrize("how", ["cancel", "leave", "task"])
def test_leaving_cancels_at_the_peer(how: str) -> None:
    reasons: list[StreamCancelled] = []

    async def wait(stream: PeerStream) -> None:
        assert stream.first() == Message("ask")
        try:
            while await stream.receive() is None:  # its end, before it leaves
                await trio.sleep(0.01)
        except StreamCancelled as error:
            reasons.append(error)

    async def test() -> None:
        async with ends(wait) as pair:
            stream = await pair.dialler.open(Message("ask"))
            await trio.testing.wait_all_tasks_blocked()
            assert pair.acceptor.streams == 1
            if how == "cancel":
                stream.cancel()
            elif how == "leave":
                with stream:
                    await stream.end()
            else:
                with trio.CancelScope() as scope, stream:
                    scope.cancel()
                    await stream.receive()
            while not reasons:
                await trio.sleep(0.01)
            assert pair.dialler.streams == pair.acceptor.streams == 0

    run(test)
    assert len(reasons) == 1


def test_a_stream_left_before_it_was_written_never_reaches_the_peer() -> None:
    async def test() -> None:
        async with ends() as pair:
            (await pair.dialler.open(Message("ask"))).cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert pair.dialler.streams == pair.acceptor.streams == 0

    run(test)


def test_a_cancelled_send_tears_nothing() -> None:
    async def test() -> None:
        async with ends(echo) as pair:
            hurt = await pair.dialler.open(Message("hurt", {}, bytes(MAX_BODY_BYTES)))
            with trio.move_on_after(0.01):
                await hurt.send(Message("more", {}, bytes(1000)))
            hurt.cancel()
            with await pair.dialler.open(Message("fine", {"n": 1})) as stream:
                assert await stream.receive() == Message("fine", {"n": 1})
            assert pair.dialler.usable

    run(test)


def test_a_sender_waits_for_a_reader_that_does_not_read() -> None:
    async def test() -> None:
        async with ends() as pair:
            stream = await pair.dialler.open(Message("first"))
            sent = 0
            with trio.move_on_after(0.2):
                while True:
                    await stream.send(Message("more", {}, bytes(50_000)))
                    sent += 1
            assert 10 < sent < 60

    run(test)


def test_a_lost_connection_ends_every_wait_with_the_reason() -> None:
    async def test() -> None:
        async with ends() as pair:
            stream = await pair.dialler.open(Message("ask"))
            seen: list[str] = []

            async def receive() -> None:
                with pytest.raises(LinkLost) as caught:
                    await stream.receive()
                seen.append(caught.value.message)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                pair.acceptor.close("bored")
                assert await pair.acceptor.closed() == "bored"
                assert await pair.dialler.closed() == "closed by the peer"
            assert "closed by the peer" in seen[0]
            with pytest.raises(LinkLost):
                await pair.dialler.open(Message("ask"))
            with pytest.raises(LinkLost):
                await stream.send(Message("more"))
            stream.cancel()
            stream.fail(NeedRows(1))

    run(test)


def test_bytes_that_are_no_frames_close_the_link() -> None:
    async def test() -> None:
        left, right = trio.testing.memory_stream_pair()
        link = PeerLink(left, Multiplexer(dialler=True), B, accept=lambda stream: stream.cancel())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            await right.send_all(b"GET / HTTP/1.1\r\n\r\n")
            assert (await link.closed()).startswith("bad frame")

    run(test)


def test_pings_measure_bring_a_workers_state_and_hurry_while_watched() -> None:
    state = {"tick": 1}

    async def work(stream: trio.abc.ReceiveStream, answers: trio.abc.SendStream) -> None:
        mux = Multiplexer(dialler=False)
        async for raw in stream:
            for event in mux.receive_untrusted(raw):
                assert isinstance(event, Pinged)
                mux.pong(event.nonce, state)
            await answers.send_all(mux.next_bytes())

    async def test() -> None:
        left, right = trio.testing.memory_stream_pair()
        link = PeerLink(left, Multiplexer(dialler=True), B, accept=PeerStream.cancel)

        async def until(tick: int) -> float:
            start = trio.current_time()
            while link.pong != {"tick": tick}:
                await trio.sleep(0.01)
            return trio.current_time() - start

        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            nursery.start_soon(work, right, right)
            await until(1)
            assert link.rtt_ms is not None
            state["tick"] = 2
            assert await until(2) > 1
            async with link.watch():
                await trio.testing.wait_all_tasks_blocked()
                state["tick"] = 3
                assert await until(3) < 0.5
            assert trio.current_time() - link.last_heard < 0.5
            nursery.cancel_scope.cancel()

    run(test, mock_clock=True)


@pytest.mark.parametrize("speaks", [False, True])
@pytest.mark.parametrize(("watched", "least_s", "most_s"), [(True, 9, 12), (False, 29, 35)])
def test_a_peer_that_answers_no_ping_is_silent(watched: bool, least_s: float, most_s: float, speaks: bool) -> None:
    """Also one that still sends pings of its own: nothing says that it hears anything."""

    async def test() -> None:
        left, right = trio.testing.memory_stream_pair()
        link = PeerLink(left, Multiplexer(dialler=True), B, accept=lambda stream: stream.cancel())
        peer = Multiplexer(dialler=False)
        start = trio.current_time()

        async def speak() -> None:
            for nonce in range(1000):
                peer.ping(nonce)
                await right.send_all(peer.next_bytes())
                await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            if speaks:
                nursery.start_soon(speak)
            if watched:
                async with link.watch():
                    assert await link.closed() == "silent"
            else:
                assert await link.closed() == "silent"
            nursery.cancel_scope.cancel()
        assert link.last_heard == start
        assert least_s < trio.current_time() - start < most_s

    run(test, mock_clock=True)


@pytest.mark.parametrize("every_s", [0.05, 0.15, 0.5])
def test_a_silent_link_is_stuck_and_then_closed_however_often_somebody_begins_to_watch(every_s: float) -> None:
    """Each watch sends a ping at once: a link under load is judged as one that a single caller waits on."""

    async def test() -> None:
        left, _right = trio.testing.memory_stream_pair()
        link = PeerLink(left, Multiplexer(dialler=True), B, accept=PeerStream.cancel)
        start = trio.current_time()

        async def watch_again_and_again() -> None:
            while True:
                async with link.watch():
                    await trio.sleep(every_s)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            nursery.start_soon(watch_again_and_again)
            await trio.sleep(1.9)
            assert link.stuck(trio.current_time())
            with trio.fail_after(20):
                assert await link.closed() == "silent"
            nursery.cancel_scope.cancel()
        assert 9 < trio.current_time() - start < 12

    run(test, mock_clock=True)


def test_a_link_that_is_answered_is_not_stuck_however_often_somebody_begins_to_watch() -> None:
    async def test() -> None:
        async with ends() as pair:
            for _ in range(200):
                async with pair.dialler.watch():
                    await trio.sleep(0.1)
                assert not pair.dialler.stuck(trio.current_time())
            assert pair.dialler.reason is None

    run(test, mock_clock=True)


def test_silence_that_nobody_watched_does_not_close_a_link_when_somebody_begins_to() -> None:
    async def test() -> None:
        left, right = trio.testing.memory_stream_pair()
        link = PeerLink(left, Multiplexer(dialler=True), B, accept=PeerStream.cancel)
        peer = Multiplexer(dialler=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            await trio.sleep(15)
            async with link.watch():
                await trio.sleep(5)
                assert link.reason is None
                peer.pong(1, {})
                await right.send_all(peer.next_bytes())
                await trio.sleep(9)
                assert link.reason is None
            nursery.cancel_scope.cancel()

    run(test, mock_clock=True)


def test_draining_lets_running_streams_finish_and_opens_no_more() -> None:
    go = trio.Event()

    async def slow(stream: PeerStream) -> None:
        with stream:
            await go.wait()
            await stream.send(Message("answer", {}, bytes(500_000)))
            await stream.end()

    async def test() -> None:
        async with ends(slow) as pair, trio.open_nursery() as nursery:
            stream = await pair.dialler.open(Message("ask"))
            await stream.end()
            await trio.testing.wait_all_tasks_blocked()

            async def drain() -> None:
                await pair.acceptor.drain("leaving", grace_s=20)

            nursery.start_soon(drain)
            await trio.testing.wait_all_tasks_blocked()
            assert not pair.dialler.usable
            with pytest.raises(LinkLost, match="leaving"):
                await pair.dialler.open(Message("late"))
            go.set()
            message = await stream.receive()
            assert message is not None
            assert len(message.body) == 500_000
            assert await pair.dialler.closed() == "leaving"

    run(test)


def test_a_message_that_may_not_travel_fails_its_sender_only() -> None:
    async def test() -> None:
        async with ends(echo) as pair:
            stream = await pair.dialler.open(Message("ask"))
            with pytest.raises(ValueError, match="may not travel"):
                await stream.send(Message("bad", {"text": "x" * 1000}))
            with pytest.raises(ValueError, match="may not travel"):
                await pair.dialler.open(Message("bad", {"text": "x" * 1000}))
            await stream.send(Message("good"))
            assert await stream.receive() == Message("ask")
            assert await stream.receive() == Message("good")

    run(test)


def test_many_streams_share_a_link() -> None:
    async def test() -> None:
        async with ends(echo, memory=False) as pair, trio.open_nursery() as nursery:

            async def one(n: int) -> None:
                with await pair.dialler.open(Message("m", {"n": n}, bytes([n]) * (n * 3000))) as stream:
                    for turn in range(5):
                        message = await stream.receive()
                        assert message is not None
                        assert message.body == bytes([n]) * (n * 3000)
                        await stream.send(Message("m", {"turn": turn}, message.body))

            for n in range(64):
                nursery.start_soon(one, n)

    run(test)
