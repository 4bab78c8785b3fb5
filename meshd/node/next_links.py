"""Keeps a link open to each ``--next`` replica, so that it is known, watched, and back within a second of its return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from meshd.errors import MeshdError
from meshd.links.wire import Links
from meshd.vocabulary import Endpoint, NodeId

REDIAL_S: Final = 0.4


async def keep_links(links: Links, endpoints: Sequence[Endpoint], log: Callable[[str], None]) -> None:
    """Dial each address again whenever there is no link to the node that answered there. Runs until cancelled."""
    async with trio.open_nursery() as nursery:
        for endpoint in endpoints:
            nursery.start_soon(_keep, links, endpoint, log)


async def _keep(links: Links, endpoint: Endpoint, log: Callable[[str], None]) -> None:
    last = ""
    peer: NodeId | None = None
    while True:
        try:
            # A pair keeps few connections: a new one for each that gave way to another would drive that one out in turn.
            link = links.live(peer) if peer is not None else None
            if link is None:
                link = await links.dial(endpoint)
            peer, last = link.peer, ""
            await link.closed()
        except MeshdError as error:
            if error.message != last:
                last = error.message
                log(f"--next {endpoint}: {error.message}")
        await trio.sleep(REDIAL_S)
