"""A node of fakes behind a real loopback socket."""

from __future__ import annotations

import io
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import Any

import httpx
import trio

from meshd.api.app import App
from meshd.api.guards import Guards
from meshd.api.http import HttpServer, listen
from meshd.api.limits import Limits
from meshd.api.node import Node, NodeFacts
from meshd.directory import Directory, Member
from meshd.eventlog import EventLog
from meshd.vocabulary import Advert, Capability, Endpoint, Health, LayerRange, ModelSpec, NodeId, NodeStatus
from tests.fakes.chain import N1, N2, FakeChain
from tests.fakes.text import EOS, VOCAB, ByteText

LOOPBACK = Endpoint("127.0.0.1", 0)
SPEC = ModelSpec(
    name="tiny",
    digest="d1",
    dtype="bfloat16",
    num_layers=30,
    hidden_size=4,
    vocab_size=VOCAB,
    layer_bytes=(100,) * 30,
    embed_bytes=10,
    head_bytes=10,
    tied=True,
    kv_bytes_per_token_layer=8,
    context=100,
    eos_ids=(EOS,),
)


def member(
    node_id: NodeId,
    name: str,
    layers: tuple[int, int] | None,
    *,
    state: NodeStatus = NodeStatus.ALIVE,
    admitted: bool | None = True,
    digest: str = "d1",
    model: str = "tiny",
    num_layers: int = 30,
    **more: Any,
) -> Member:
    advert = Advert(
        node_id=node_id,
        name=name,
        epoch=1,
        incarnation=1,
        addresses=(Endpoint("10.0.0.1", 8091),),
        http=Endpoint("10.0.0.1", 8090),
        model=model,
        digest=digest,
        num_layers=num_layers,
        layers=LayerRange(*layers) if layers else None,
        capability=Capability(capacity_mb=1000, layer_ms_1=0.5),
        entry=True,
    )
    return Member(replace(advert, **more), state, Health(), admitted=admitted)


TWO = Directory(N1).replace([member(N1, "n1", (0, 15)), member(N2, "n2", (15, 30))])


@dataclass
class Rig:
    """What a test changes of the node; read at each request."""

    chain: FakeChain = field(default_factory=FakeChain)
    text: ByteText | None = field(default_factory=ByteText)
    spec: ModelSpec | None = SPEC
    directory: Directory = TWO
    facts: NodeFacts = field(default_factory=lambda: NodeFacts(state="ready", name="n1", version="0"))
    engine: Any = None
    pass_on: Any = None
    log: EventLog = field(default_factory=lambda: EventLog(N1, "n1", out=io.StringIO()))
    calls: list[str] = field(default_factory=list)

    def node(self) -> Node:
        async def drain() -> None:
            self.calls.append("drain")

        async def resume() -> None:
            self.calls.append("resume")

        return Node(
            chain=self.chain,
            directory=lambda: self.directory,
            facts=lambda: self.facts,
            text=lambda: self.text,
            spec=lambda: self.spec,
            engine=lambda: self.engine,
            routing=lambda model: {"config": {}, "models": {model or "tiny": {"epoch": 0, "candidates": []}}},
            events=self.log,
            drain=drain,
            resume=resume,
            pass_on=self.pass_on,
            rng=random.Random(7),
        )


@contextmanager
def served(rig: Rig, *, guards: Guards | None = None, limits: Limits | None = None) -> Iterator[str]:
    """The base URL of a server that runs in a thread of its own, for clients that block."""
    ready: Queue[tuple[HttpServer, trio.lowlevel.TrioToken] | BaseException] = Queue()

    async def main() -> None:
        server = HttpServer(App(rig.node(), guards), await listen([LOOPBACK]), limits)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            ready.put((server, trio.lowlevel.current_trio_token()))

    def thread() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            ready.put(error)
            raise

    runner = threading.Thread(target=thread)
    runner.start()
    found = ready.get(timeout=10)
    if isinstance(found, BaseException):
        raise found
    server, token = found
    try:
        yield f"http://{server.endpoints[0]}"
    finally:
        token.run_sync_soon(server.shutdown)
        runner.join(timeout=20)
        assert not runner.is_alive(), "the server did not shut down"


@contextmanager
def client(rig: Rig, *, guards: Guards | None = None, limits: Limits | None = None) -> Iterator[httpx.Client]:
    with served(rig, guards=guards, limits=limits) as url, httpx.Client(base_url=url, trust_env=False) as http:
        yield http


def raw_get(http: httpx.Client, target: str) -> tuple[int, Any]:
    """Status and document of a target sent as it stands: clients tidy up dots and slashes first."""
    url = http.base_url
    with socket.create_connection((url.host, url.port or 80), timeout=10) as stream:
        stream.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        data = b"".join(iter(lambda: stream.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def events_of(text: str) -> list[str]:
    """The data of each server-sent event; every one must be ``data: ``, one line, a blank line."""
    assert text.endswith("\n\n"), text[-80:]
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames), frames
    return [frame.removeprefix("data: ") for frame in frames]
