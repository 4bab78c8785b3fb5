"""A link is kept to each `--next` replica, one for the node and not one for each of its addresses."""

from __future__ import annotations

from typing import Any, cast

import trio
import trio.testing

from meshd.errors import LinkLost
from meshd.links.wire import Links
from meshd.node.next_links import keep_links
from meshd.vocabulary import Endpoint, NodeId

PEER = NodeId("1" * 32)
CABLE, RADIO = Endpoint("10.0.0.1", 8091), Endpoint("10.0.1.1", 8091)


class Connection:
    peer = PEER

    def __init__(self) -> None:
        self.gone = trio.Event()

    async def closed(self) -> str:
        await self.gone.wait()
        return "superseded"


class Pool:
    """One node at both addresses; the newest connection is the live one. ``silent``: nobody answers a dial."""

    def __init__(self) -> None:
        self.silent = 0
        self.open: list[Connection] = []
        self.dialled: list[Endpoint] = []

    def live(self, node_id: NodeId) -> Any:
        return next((link for link in reversed(self.open) if not link.gone.is_set()), None) if node_id == PEER else None

    async def dial(self, endpoint: Endpoint, **_: object) -> Any:
        self.dialled.append(endpoint)
        if self.silent:
            self.silent -= 1
            raise LinkLost(f"{endpoint}: refused")
        self.open.append(Connection())
        return self.open[-1]


def test_a_link_that_gave_way_to_another_of_the_same_node_is_not_dialled_again() -> None:
    async def main() -> None:
        pool, said = Pool(), list[str]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_links, cast(Links, pool), [CABLE, RADIO], said.append)
            await trio.sleep(5)
            assert sorted(pool.dialled) == [CABLE, RADIO]
            pool.open[0].gone.set()
            await trio.sleep(5)
            assert len(pool.dialled) == 2
            pool.silent = 2
            pool.open[1].gone.set()
            await trio.sleep(5)
            assert len(pool.dialled) > 4
            assert pool.live(PEER) is not None
            assert any("refused" in line for line in said)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
