"""Round trips of one message on an open stream: 1 KB (a decode step) and 1 MB (a prefill), to another process.

Over a socketpair (daemon to worker), plain loopback TCP, and TLS on loopback; beside each the same bytes over bare blocking
sockets in the same run, because only the ratio travels to another machine.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import trio

from benchmarks import Recorder, quantiles
from meshd.errors import LinkLost, StreamCancelled
from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.identity.node_key import NodeKey
from meshd.links import tls
from meshd.links.multiplex import Multiplexer
from meshd.links.peer_link import PeerLink
from meshd.links.peer_stream import PeerStream
from meshd.links.wire import Message
from meshd.vocabulary import NodeId

SIZES = {"1KB": (1 << 10, 2000), "1MB": (1 << 20, 100)}
WARM_UP = 20
RING = KeyRing((MeshKey(b"benchmark key of 32 bytes length"),))
PEER = NodeId("0" * 32)


def run() -> None:
    recorder = Recorder("link_latency")
    for wire in ("socketpair", "plain", "tls"):
        for size, times in SIZES.items():
            bare = _bare(*times) if wire == "socketpair" else {}
            spread = _with_peer(wire, functools.partial(_round_trips, *times))
            recorder.row(wire=wire, size=size, unit="us", **spread)
            if bare:
                recorder.row(wire="bare socketpair", size=size, unit="us", **bare)


def _with_peer(wire: str, measure: Callable[[PeerLink], Awaitable[dict[str, float]]]) -> dict[str, float]:
    ours, theirs = socket.socketpair() if wire == "socketpair" else _tcp_pair()
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.link_latency", wire, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    ):
        theirs.close()
        return trio.run(_measure, wire, ours, measure)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


async def _stream(wire: str, sock: socket.socket, *, dialler: bool) -> trio.abc.Stream:
    transport = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    if wire != "tls":
        return transport
    stream = tls.LinkTls(NodeKey.generate(), RING).wrap(transport, dialler=dialler)
    await tls.prove(stream)
    return stream


async def _measure(
    wire: str, sock: socket.socket, measure: Callable[[PeerLink], Awaitable[dict[str, float]]]
) -> dict[str, float]:
    stream = await _stream(wire, sock, dialler=True)
    link = PeerLink(stream, Multiplexer(dialler=True), PEER, accept=lambda inbound: inbound.cancel())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        spread = await measure(link)
        link.close("measured")
    return spread


async def _round_trips(size: int, times: int, link: PeerLink) -> dict[str, float]:
    message = Message("step", {"session": "a" * 32, "seq": 1}, bytes(size))
    taken_us = []
    with await link.open(message) as stream:
        await stream.receive()
        for _ in range(WARM_UP + times):
            start = time.perf_counter()
            await stream.send(message)
            await stream.receive()
            taken_us.append((time.perf_counter() - start) * 1e6)
    return quantiles(taken_us[WARM_UP:])


async def _echo(wire: str, fd: int) -> None:
    stream = await _stream(wire, socket.socket(fileno=fd), dialler=False)
    async with trio.open_nursery() as nursery:

        async def echo(opened: PeerStream) -> None:
            message = opened.first()
            with contextlib.suppress(LinkLost, StreamCancelled):  # the parent measured and left
                while message is not None:
                    await opened.send(message)
                    message = await opened.receive()

        link = PeerLink(
            stream, Multiplexer(dialler=False), PEER, accept=lambda opened: nursery.start_soon(echo, opened)
        )
        await link.run()
        nursery.cancel_scope.cancel()


_BARE = """
import socket, sys
sock, size = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
buffer = memoryview(bytearray(size))
while True:
    got = 0
    while got < size:
        n = sock.recv_into(buffer[got:])
        if not n: sys.exit()
        got += n
    sock.sendall(buffer)
"""


def _bare(size: int, times: int) -> dict[str, float]:
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    buffer, taken_us = memoryview(bytearray(size)), []
    with subprocess.Popen([sys.executable, "-c", _BARE, str(fd), str(size)], pass_fds=[fd]), ours:
        theirs.close()
        for _ in range(WARM_UP + times):
            start = time.perf_counter()
            ours.sendall(buffer)
            got = 0
            while got < size:
                got += ours.recv_into(buffer[got:])
            taken_us.append((time.perf_counter() - start) * 1e6)
    return quantiles(taken_us[WARM_UP:])


if __name__ == "__main__":
    trio.run(_echo, sys.argv[1], int(sys.argv[2]))
