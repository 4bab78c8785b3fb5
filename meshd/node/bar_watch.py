"""Closes the links of nodes that were put on the block list while they were linked.

The list is asked when a link is made; a device that is reported stolen has made its links long before. Without this it would
stay a member through them, whatever key the room changes to.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Final, Protocol

import trio

from meshd.vocabulary import NodeId

LOOK_S: Final = 2.0


class Closable(Protocol):
    """What this needs of the link pool."""

    @property
    def peers(self) -> Sequence[NodeId]: ...

    def close(self, node_id: NodeId, reason: str = ...) -> None: ...


async def watch_bars(links: Closable, barred: Container[NodeId], tell: Callable[[NodeId], None]) -> None:
    """Until cancelled. ``tell`` is called for each link that was closed."""
    while True:
        for node_id in links.peers:
            if node_id in barred:
                links.close(node_id, "barred")
                tell(node_id)
        await trio.sleep(LOOK_S)
