"""A node that is barred while it is linked loses its link."""

from __future__ import annotations

import trio
import trio.testing

from meshd.node.bar_watch import watch_bars
from meshd.vocabulary import NodeId

A, B = NodeId("a" * 32), NodeId("b" * 32)


class Links:
    def __init__(self) -> None:
        self.peers = [A, B]

    def close(self, node_id: NodeId, reason: str = "") -> None:
        self.peers.remove(node_id)


def test_only_the_barred_lose_their_links_and_it_is_told_once() -> None:
    links, barred, told = Links(), set[NodeId](), list[NodeId]()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_bars, links, barred, told.append)
            await trio.sleep(10)
            assert links.peers == [A, B]
            barred.add(B)
            await trio.sleep(10)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert links.peers == [A]
    assert told == [B]
