"""What a message costs that goes round through a few processes over loopback when nothing is done with it: the floor of a hop.

Each process is trio, a socket and, if asked for, trio's own TLS; nothing of the daemon's but certificates. One passes on whatever
comes, the head counts the bytes of its message and times how long one takes to come back.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import trio

from meshd.identity.certificates import leaf_pem
from meshd.identity.mesh_key import MeshKey
from meshd.identity.node_key import NodeKey

MESSAGE = bytes(400)  # about what a decode step of the hash model takes on a link
HOST = "127.0.0.1"


class Ring:
    """``stages`` processes, each connected to the next and the last to the first. A context manager."""

    def __init__(self, stages: int, wire: str) -> None:
        self._ended = ExitStack()
        before = socket.create_server((HOST, 0))  # where the last one will find the head
        port, self.passers = before.getsockname()[1], list[subprocess.Popen[str]]()
        for _ in range(stages - 1):
            passer = self._start(wire, "pass", port)
            port = int(_line(passer))
            self.passers.append(passer)
        self._head = self._start(wire, "head", port, before)
        before.close()

    def _start(self, wire: str, role: str, port: int, given: socket.socket | None = None) -> subprocess.Popen[str]:
        handed = [] if given is None else [given.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._ring", wire, role, str(port), *map(str, handed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=handed,
        )
        self._ended.enter_context(process)
        self._ended.callback(process.kill)
        return process

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def rounds_ms(self, count: int) -> list[float]:
        """How long each of ``count`` messages took to come back, one after the other."""
        assert self._head.stdin is not None  # it is a pipe
        print(count, file=self._head.stdin, flush=True)
        found: list[float] = json.loads(_line(self._head))
        return found


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None  # it is a pipe
    return process.stdout.readline()


async def _pass(wire: str, port: int) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host=HOST)
    print(listener.socket.getsockname()[1], flush=True)
    before = _wrapped(wire, await listener.accept(), server_side=True)
    after = _wrapped(wire, await trio.open_tcp_stream(HOST, port), server_side=False)
    with contextlib.suppress(trio.BrokenResourceError):  # killed from behind, when the ring ends
        while data := await before.receive_some(1 << 16):
            await after.send_all(data)


async def _head(wire: str, port: int, given: int) -> None:
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(_listening(given)))
    after = _wrapped(wire, await trio.open_tcp_stream(HOST, port), server_side=False)
    before = _wrapped(wire, await listener.accept(), server_side=True)
    for line in sys.stdin:  # nothing else runs here, so it may block
        times = [time.perf_counter()]
        for _ in range(int(line)):
            await after.send_all(MESSAGE)
            missing = len(MESSAGE)
            while missing:
                missing -= len(await before.receive_some(missing))
            times.append(time.perf_counter())
        print([(b - a) * 1e3 for a, b in itertools.pairwise(times)], flush=True)


def _listening(descriptor: int) -> socket.socket:
    listening = socket.socket(fileno=descriptor)
    listening.setblocking(False)
    return listening


def _wrapped(wire: str, stream: trio.SocketStream, *, server_side: bool) -> trio.abc.Stream:
    if wire == "plain":
        return stream
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if server_side:
        key = NodeKey.generate()
        with tempfile.TemporaryDirectory() as folder:
            shown = Path(folder) / "leaf.pem"
            shown.write_bytes(leaf_pem(key, MeshKey.generate()) + key.pem())
            context.load_cert_chain(shown)
    return trio.SSLStream(stream, context, server_side=server_side)


def main(wire: str, role: str, port: str, *given: str) -> None:
    """One process of a ring."""
    if role == "head":
        trio.run(_head, wire, int(port), int(given[0]))
    else:
        trio.run(_pass, wire, int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
