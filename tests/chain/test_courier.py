"""What is told of messages that could not be brought, and what becomes of streams that somebody is done with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import trio
import trio.testing

from meshd.chain.courier import Courier
from meshd.chain.messages import Ask, ChainMessage, Why
from meshd.errors import LinkLost
from meshd.links.multiplex import Multiplexer
from meshd.links.peer_link import PeerLink
from meshd.links.peer_stream import PeerStream
from meshd.links.wire import Links
from meshd.vocabulary import NodeId, SessionId
from tests.chain.steps import STEP, changed

ME, PEER, SESSION = NodeId("1" * 32), NodeId("2" * 32), SessionId("5" * 32)


class Unreachable:
    """Links on which every dial takes a while and fails."""

    def live(self, _node: NodeId) -> None:
        return None

    async def get(self, _node: NodeId) -> Any:
        await trio.sleep(1.0)
        raise LinkLost("nobody there")


class OneLink:
    """Links of a node with one peer."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link

    def live(self, _node: NodeId) -> PeerLink:
        return self._link

    async def get(self, _node: NodeId) -> PeerLink:
        return self._link


@dataclass
class Pair:
    """A courier here, and the link's other end, whose streams go to the handler of `paired`."""

    here: Courier
    there: PeerLink
    told: list[Why]


@asynccontextmanager
async def paired(handler: Callable[[PeerLink, PeerStream], Awaitable[None]]) -> AsyncIterator[Pair]:
    left, right = trio.testing.memory_stream_pair()
    told: list[Why] = []
    async with trio.open_nursery() as nursery:

        def accept(stream: PeerStream) -> None:
            nursery.start_soon(handler, there, stream)

        near = PeerLink(left, Multiplexer(dialler=True), PEER, accept=PeerStream.cancel)
        there = PeerLink(right, Multiplexer(dialler=False), ME, accept=accept)
        here = courier(ME, near, lambda _source, _message: None, told)
        for task in (near.run, there.run):
            nursery.start_soon(task)
        await nursery.start(here.run)
        yield Pair(here, there, told)
        nursery.cancel_scope.cancel()


def courier(node: NodeId, link: PeerLink, deliver: Callable[[NodeId, ChainMessage], None], told: list[Why]) -> Courier:
    return Courier(
        node,
        cast(Links, OneLink(link)),
        deliver=deliver,
        lost=lambda _session, _node, why, _attempt: told.append(why),
    )


def test_a_session_that_is_over_at_the_peer_leaves_nothing_on_the_link() -> None:
    """Its steps still come for a while: kept unread they would use up the link's budget, one session after the other."""

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            theirs: list[Courier] = []

            async def serve(link: PeerLink, stream: PeerStream) -> None:
                if not theirs:
                    theirs.append(courier(PEER, link, lambda _source, message: theirs[0].close(message.session), told))
                    await nursery.start(theirs[0].run)
                first = stream.first()
                assert first is not None
                await theirs[0].handle(ME, first, stream)

            async with paired(serve) as pair:
                told = pair.told
                for seq in range(12):
                    pair.here.send(PEER, changed(STEP, seq=seq, n=12, rows=bytes(200_000)))
                await trio.sleep(1.0)
                pair.here.close(STEP.plan.session)
                await trio.sleep(1.0)
                assert pair.here.streams == theirs[0].streams == pair.there.streams == 0
                assert pair.there.mux._unread_bytes == 0
                assert not told
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_stream_that_the_peer_gave_up_is_not_used_for_the_next_message() -> None:
    """The peer is well and reads: the message goes on another stream, and nothing is lost."""
    streams: list[PeerStream] = []

    async def serve(_link: PeerLink, stream: PeerStream) -> None:
        streams.append(stream)

    async def scenario() -> None:
        async with paired(serve) as pair:
            pair.here.send(PEER, Ask(SESSION, 1, 1))
            await trio.sleep(1.0)
            streams[0].cancel()
            await trio.sleep(1.0)
            assert pair.here.streams == 0
            pair.here.send(PEER, Ask(SESSION, 1, 2))
            await trio.sleep(1.0)
            assert len(streams) == 2
            assert pair.told == []

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


def test_each_attempt_hears_that_its_messages_are_lost_however_they_waited() -> None:
    """The step of a later attempt waits behind a question about an earlier one: whoever waits for that step must hear of it."""
    told: list[tuple[NodeId, Why, int | None]] = []

    async def scenario() -> None:
        courier = Courier(
            ME,
            cast(Links, Unreachable()),
            deliver=lambda _source, _message: None,
            lost=lambda _session, node, why, attempt: told.append((node, why, attempt)),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(courier.run)
            for attempt in (3, 4, 4, 6):
                courier.send(PEER, Ask(SESSION, attempt, attempt))
            await trio.sleep(1.5)
            assert told == [(PEER, Why.REFUSED, attempt) for attempt in (3, 4, 6)]
            assert courier.streams == 0
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
