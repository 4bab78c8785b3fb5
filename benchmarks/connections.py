"""Thousands of connections of no use beside streams that matter: does any stream fail, how much later is its first token?

Two daemons with a half of the rehearsal model each. 20 streams run without pause for ``CONNECTIONS_S`` (120) seconds with nobody
else there, then again while 5,000 clients hold a connection and say nothing and 500 send a body a byte a second; whichever the
node drops connects again within a minute. The streams connect anew for every request, so each needs a place among the crowd.
"""

from __future__ import annotations

import os
import random
import time

import trio

from benchmarks import Recorder, quantiles
from benchmarks._clients import Streamed, ask
from meshd.cli.local_room import LocalRoom, Node

SECONDS = float(os.environ.get("CONNECTIONS_S", "120"))
IDLE, SLOW, STREAMS, TOKENS = 5000, 500, 20, 16
AGAIN_S = (15.0, 45.0)  # when a dropped client is back
WARM_S = 3.0
PROMPT = list(b"Tell me a story about a lighthouse.")
SLOW_HEAD = b"POST /chain HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n\r\n"


class _Crowd:
    """Clients that are only in the way."""

    def __init__(self, node: Node) -> None:
        host, _, port = node.http.rpartition(":")
        self._host, self._port = host, int(port)
        self.open = self.dropped = 0

    async def run(self, idle: int, slow: int) -> None:
        async with trio.open_nursery() as nursery:
            for i in range(idle + slow):
                nursery.start_soon(self._one, i, i >= idle)

    async def _one(self, seed: int, slow: bool) -> None:
        rng = random.Random(seed)
        await trio.sleep(rng.uniform(0, AGAIN_S[0]))
        while True:
            try:
                await self._hold(slow)
            except* (OSError, trio.BrokenResourceError):
                self.dropped += 1
            await trio.sleep(rng.uniform(*AGAIN_S))

    async def _hold(self, slow: bool) -> None:
        stream = trio.SocketStream(trio.socket.socket())
        async with stream:
            await stream.socket.connect((self._host, self._port))
            self.open += 1
            try:
                async with trio.open_nursery() as nursery:
                    if slow:
                        await stream.send_all(SLOW_HEAD)
                        nursery.start_soon(_drip, stream)
                    while await stream.receive_some(4096):
                        pass
                    self.dropped += 1
                    nursery.cancel_scope.cancel()
            finally:
                self.open -= 1


async def _drip(stream: trio.SocketStream) -> None:
    while True:
        await trio.sleep(1.0)
        await stream.send_all(b"x")


class _Streams:
    """Clients that matter."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.firsts: list[float] = []
        self.failures: list[str] = []
        self.tokens: list[int] | None = None

    async def run(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        async with trio.open_nursery() as nursery:
            for _ in range(STREAMS):
                nursery.start_soon(self._person, until)

    async def _person(self, until: float) -> None:
        while time.perf_counter() < until:
            try:
                self._heard(await ask(self._node, tokens=PROMPT, max_tokens=TOKENS))
            except (RuntimeError, OSError, trio.BrokenResourceError) as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:200])

    def _heard(self, answer: Streamed) -> None:
        self.firsts.append(answer.first_ms)
        self.tokens = self.tokens or answer.tokens
        if answer.tokens != self.tokens:
            self.failures.append(f"other tokens: {answer.tokens}")


def run() -> None:
    recorder = Recorder("connections")
    with LocalRoom("hash:30,step_ms=20,layer_mb=1") as room:
        for name, layers in (("n1", "0..15"), ("n2", "15..30")):
            room.add(name, "--layers", layers, "--capacity-mb", "200")
        room.wait(nodes=2, timeout_s=60)
        trio.run(_measure, recorder, room.nodes["n1"])


async def _measure(recorder: Recorder, node: Node) -> None:
    quiet, crowded, crowd = _Streams(node), _Streams(node), _Crowd(node)
    await _Streams(node).run(WARM_S)
    await quiet.run(SECONDS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd.run, IDLE, SLOW)
        await trio.sleep(AGAIN_S[0])  # until everybody has come once
        await crowded.run(SECONDS)
        nursery.cancel_scope.cancel()
    for what, streams in (("quiet", quiet), ("crowded", crowded)):
        recorder.row(
            what=what, requests=len(streams.firsts), failures=len(streams.failures), first_ms=quantiles(streams.firsts)
        )
        for failure in sorted(set(streams.failures))[:5]:
            recorder.row(what=what, failure=failure)
    before, after = quantiles(quiet.firsts), quantiles(crowded.firsts)
    recorder.row(what="ratio", first_p95=after["p95"] / before["p95"], dropped=crowd.dropped, idle=IDLE, slow=SLOW)
