"""Streams that are listened to, and messages that are sent without waiting."""

import pytest
import trio
import trio.testing

from meshd.errors import StreamCancelled
from meshd.links.peer_stream import SEND_AHEAD_BYTES, PeerStream
from meshd.links.wire import Message
from tests.links.test_peer_link import ends, run


def test_a_listener_gets_every_message_in_order_and_then_the_end() -> None:
    heard: list[int] = []
    over = trio.Event()

    async def listen(stream: PeerStream) -> None:
        with stream:
            await stream.listen(lambda message: heard.append(message.head["n"]))
            await stream.end()
            over.set()

    async def test() -> None:
        async with ends(listen, memory=False) as pair:
            with await pair.dialler.open(Message("first", {"n": 0})) as stream:
                for n in range(1, 50):
                    await stream.send(Message("next", {"n": n}))
                await stream.end()
                await over.wait()
                assert await stream.receive() is None
        assert heard == list(range(1, 50))  # the first message opened the stream

    run(test)


def test_what_a_listener_raises_is_its_own() -> None:
    raised = trio.Event()

    async def listen(stream: PeerStream) -> None:
        def take(_message: Message) -> None:
            raise KeyError("mine")

        with stream, pytest.raises(KeyError, match="mine"):
            await stream.listen(take)
        raised.set()

    async def test() -> None:
        async with ends(listen) as pair:
            stream = await pair.dialler.open(Message("first"))
            await stream.send(Message("next"))
            await raised.wait()
            with pytest.raises(StreamCancelled):
                await stream.receive()
            assert pair.acceptor.reason is None

    run(test)


def test_a_listener_that_was_cancelled_keeps_nothing_and_can_still_answer() -> None:
    """Unread messages would hold the link's budget for good, and the credit without which the peer cannot bring its end."""

    async def listen(stream: PeerStream) -> None:
        with trio.CancelScope() as scope:
            await stream.listen(lambda _message: scope.cancel())
        await stream.send(Message("answer"))
        await stream.end()

    async def test() -> None:
        async with ends(listen) as pair:
            with await pair.dialler.open(Message("first")) as stream:
                for _ in range(30):
                    await stream.send(Message("next", {}, bytes(100_000)))
                assert await stream.receive() == Message("answer")
                await stream.end()
            await trio.testing.wait_all_tasks_blocked()
            assert pair.dialler.streams == pair.acceptor.streams == 0
            assert pair.acceptor.mux._unread_bytes == 0

    run(test)


def test_an_offer_is_refused_when_it_would_wait_or_cannot_be() -> None:
    async def test() -> None:
        async with ends() as pair:
            stream = await pair.dialler.open(Message("first"))
            assert stream.offer(Message("next"))
            big = Message("next", {}, bytes(1 << 20))
            taken = 0
            while stream.offer(big):
                taken += 1
                assert pair.dialler.mux.queued_bytes(stream.id) <= SEND_AHEAD_BYTES + taken * len(big.body)
                assert taken < 20
            stream.cancel()
            assert not stream.offer(Message("next"))

    run(test)


def test_a_message_and_its_end_travel_together() -> None:
    async def answer(stream: PeerStream) -> None:
        with stream:
            first = stream.first()
            assert first is not None
            assert await stream.receive() is None
            await stream.send(first)
            await stream.end()

    async def test() -> None:
        async with ends(answer) as pair:
            with await pair.dialler.open(Message("ask", {"n": 1}), last=True) as stream:
                reply = await stream.receive()
                assert reply is not None
                assert reply.head == {"n": 1}

    run(test)
