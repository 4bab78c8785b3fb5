"""What is told of messages that could not be brought."""

from __future__ import annotations

from typing import Any, cast

import trio
import trio.testing

from meshd.chain.courier import Courier
from meshd.chain.messages import Ask, Why
from meshd.errors import LinkLost
from meshd.links.wire import Links
from meshd.vocabulary import NodeId, SessionId

ME, PEER, SESSION = NodeId("1" * 32), NodeId("2" * 32), SessionId("5" * 32)


class Unreachable:
    """Links on which every dial takes a while and fails."""

    def live(self, _node: NodeId) -> None:
        return None

    async def get(self, _node: NodeId) -> Any:
        await trio.sleep(1.0)
        raise LinkLost("nobody there")


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
