"""Who hears nobody any more knows that it is cut off itself."""

from __future__ import annotations

import trio

from meshd.chain.entry import DEAF_S
from meshd.chain.request import GenerationRequest
from tests.chain.room import node_id, open_room, run, three_stages

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
