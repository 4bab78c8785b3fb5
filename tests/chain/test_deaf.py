"""Who hears nobody any more knows that it is cut off itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from meshd.chain.entry import DEAF_S
from meshd.chain.request import GenerationRequest
from meshd.vocabulary import LayerRange
from tests.chain.room import LAYERS, Outcome, node_id, open_room, run, three_stages

REQUEST = GenerationRequest(prompt=tuple(b"a long way home"), max_tokens=400, deadline_s=60.0)


def test_an_entry_is_deaf_while_all_are_silent_and_not_for_one() -> None:
    async def scenario() -> None:
        async with open_room() as room:
            await three_stages(room)
            entry = room.nodes[9].service
            heard: list[tuple[int, bool]] = []

            async def strikes() -> None:
                await trio.sleep(0.3)
                for frozen in ((2,), (1, 2, 3, 4, 5, 6), ()):
                    for number in range(1, 7):
                        (room.net.freeze if number in frozen else room.net.thaw)(node_id(number))
                    await trio.sleep(DEAF_S + 0.4)
                    heard.append((len(frozen), entry.deaf))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(room.ask, 9, REQUEST)
                await strikes()
                nursery.cancel_scope.cancel()
            assert heard == [(1, False), (6, True), (0, False)]
            await room.quiet()
            assert not entry.deaf, "nobody is waited for"

    run(scenario)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_an_entry_that_goes_on_alone_is_not_deaf(how: str) -> None:
    """Its hops are gone for good and it has their layers itself: nobody is waited for any more."""

    async def scenario() -> None:
        async with open_room() as room:
            for number, layers in enumerate((LayerRange(0, LAYERS), LayerRange(0, 6), LayerRange(6, LAYERS)), 1):
                await room.add(number, layers, step_ms=30.0)
            entry, outcome = room.nodes[1].service, Outcome()
            request = replace(REQUEST, pinned=(node_id(2), node_id(3)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: room.ask(1, request, outcome=outcome))
                await trio.sleep(0.5)
                for number in (2, 3):
                    room.kill(number) if how == "kill" else room.net.freeze(node_id(number))
                await trio.sleep(4.0)
                before = len(outcome.tokens)
                await trio.sleep(1.0)
                assert len(outcome.tokens) > before, "it answers"
                assert not entry.deaf
                nursery.cancel_scope.cancel()

    run(scenario)
