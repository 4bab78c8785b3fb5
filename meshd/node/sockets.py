"""The addresses a daemon listens on: all of them bound before anything else is built, or none."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import trio

from meshd.api import http
from meshd.config import Config
from meshd.errors import LocalError
from meshd.gossip.transport import UdpSocket
from meshd.gossip.transport import bind as bind_udp
from meshd.links import pool
from meshd.vocabulary import Endpoint


@dataclass(frozen=True, slots=True)
class Sockets:
    """Everything bound. Links and gossip have one port, TCP and UDP."""

    web: list[trio.SocketListener]
    links: list[trio.SocketListener]
    udp: list[UdpSocket]

    @property
    def mesh(self) -> Endpoint:
        """Where links and gossip listen, the port resolved."""
        return pool.bound(self.links)[0]

    @property
    def http(self) -> Endpoint:
        return pool.bound(self.web)[0]


@contextlib.asynccontextmanager
async def bound(config: Config) -> AsyncIterator[Sockets]:
    """Bind everything or nothing. Raises LocalError naming the address and the flag."""
    if config.http is None or config.mesh is None:
        raise LocalError("no address to listen on")
    async with contextlib.AsyncExitStack() as stack:
        web = await http.listen([config.http])
        stack.push_async_callback(_close, web)
        links = await pool.listen(config.mesh)
        stack.push_async_callback(_close, links)
        yield Sockets(web, links, bind_udp(Endpoint(config.mesh.host, pool.bound(links)[0].port)))


async def _close(listeners: list[trio.SocketListener]) -> None:
    for listener in listeners:
        await listener.aclose()
