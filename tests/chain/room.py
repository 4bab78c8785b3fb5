"""Whole chains of real services over fake links and hash engines, in virtual time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing

from meshd.chain.drafts import NgramDrafts
from meshd.chain.entry import NewDrafts
from meshd.chain.request import Finished, GenerationRequest, Tokens
from meshd.chain.service import ChainService
from meshd.directory import Directory, Member
from meshd.inference.hash_engine import HashEngine
from meshd.vocabulary import Advert, Capability, LayerRange, ModelSpec, NodeId, NodeStatus
from tests.fakes.links import FakeLinks, FakeNet
from tests.fakes.planner import FakePlanner

LAYERS = 12
DIGEST = "hash-model"


def spec(num_layers: int = LAYERS) -> ModelSpec:
    return ModelSpec(
        name=f"hash:{num_layers}",
        digest=DIGEST,
        dtype="hash",
        num_layers=num_layers,
        hidden_size=16,
        vocab_size=256,
        layer_bytes=(1 << 20,) * num_layers,
        embed_bytes=0,
        head_bytes=0,
        tied=False,
        kv_bytes_per_token_layer=64,
        context=8192,
    )


def node_id(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


@dataclass
class Node:
    id: NodeId
    layers: LayerRange | None
    step_ms: float
    engine: HashEngine | None
    service: ChainService
    links: FakeLinks
    scope: trio.CancelScope
    alive: bool = True
    epoch: int = 1
    draining: bool = False
    admitted: bool | None = True
    kv_bytes: int = 1 << 30


def _claim(engine: HashEngine | None) -> Capability:
    """What a node says of its speed: what its engine measured when it started."""
    if engine is None:
        return Capability()
    return Capability(layer_ms_1=engine.info.layer_ms_1, layer_ms_64=engine.info.layer_ms_64)


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def worst_stall_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


class Room:
    def __init__(self, nursery: trio.Nursery) -> None:
        self.drafts: NewDrafts | None = None  # the rehearsal model never repeats itself: lookup finds nothing
        self.prefix_bytes: int | None = None
        self.net = FakeNet()
        self.planner = FakePlanner()
        self.directory = Directory(node_id(0))
        self.nodes: dict[int, Node] = {}
        self.notices: list[tuple[str, dict[str, Any]]] = []
        self._nursery = nursery

    async def add(
        self, number: int, layers: LayerRange | None, *, step_ms: float = 2.0, kv_bytes: int = 1 << 30, epoch: int = 1
    ) -> Node:
        me = node_id(number)
        engine = None
        if layers:
            engine = HashEngine(
                spec(),
                layers,
                step_ms=step_ms,
                generation=epoch,
                kv_bytes=kv_bytes,
                prefix_bytes=self.prefix_bytes,
            )
        links = self.net.join(me)
        service = ChainService(
            me,
            links,
            engine=lambda: engine,
            planner=self.planner,
            directory=lambda: self.directory,
            model=spec,
            rng=random.Random(number * 1000 + epoch),
            notice=lambda kind, fields: self.notices.append((kind, fields)),
            drafts=lambda request: self.drafts(request) if self.drafts else NgramDrafts(),
        )
        node = Node(me, layers, step_ms, engine, service, links, trio.CancelScope(), epoch=epoch, kv_bytes=kv_bytes)
        self.nodes[number] = node
        await self._nursery.start(self._live, node)
        self.publish()
        return node

    async def _live(self, node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        with node.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.service.run)
                task_status.started()
                async for source, first, stream in node.links.inbound():
                    nursery.start_soon(node.service.handle, source, first, stream)

    def publish(self) -> None:
        self.directory = self.directory.replace(
            Member(
                Advert(
                    node_id=n.id,
                    name=f"n{number}",
                    epoch=n.epoch,
                    incarnation=0,
                    addresses=(),
                    digest=DIGEST,
                    arith="hash",
                    num_layers=LAYERS,
                    layers=n.layers,
                    generation=n.epoch,
                    draining=n.draining,
                    capability=_claim(n.engine),
                ),
                state=NodeStatus.ALIVE,
                admitted=n.admitted,
            )
            for number, n in self.nodes.items()
        )

    def kill(self, number: int) -> None:
        """The directory still lists it, as it does for a while."""
        node = self.nodes[number]
        node.alive = False
        self.net.kill(node.id)
        node.scope.cancel()

    async def restart(self, number: int) -> Node:
        old = self.nodes[number]
        return await self.add(number, old.layers, step_ms=old.step_ms, kv_bytes=old.kv_bytes, epoch=old.epoch + 1)

    def forget(self, number: int) -> None:
        """The directory learns that the node is gone."""
        del self.nodes[number]
        self.publish()

    async def ask(
        self,
        number: int,
        request: GenerationRequest,
        *,
        on_token: Callable[[int], None] | None = None,
        outcome: Outcome | None = None,
    ) -> Outcome:
        out = outcome or Outcome()
        async with self.nodes[number].service.generate(request) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    for choice in event.choices:
                        out.tokens.append(choice.token)
                        out.times.append(trio.current_time())
                        if on_token:
                            on_token(len(out.tokens))
                elif isinstance(event, Finished):
                    out.finished = event
        return out

    @staticmethod
    def at(count: int, act: Callable[[int], Any], number: int) -> Callable[[int], None]:
        """An ``on_token`` that acts on ``number`` once, after ``count`` tokens."""

        def on_token(seen: int) -> None:
            if seen == count:
                act(number)

        return on_token

    async def quiet(self) -> None:
        """Wait until nobody holds anything of any session."""
        for _ in range(200):
            busy = [n for n in self.nodes.values() if n.alive and (n.service.sessions or n.service.streams)]
            if not busy:
                return
            await trio.sleep(0.5)
        raise AssertionError(f"still busy: {[(n.id[-2:], n.service.sessions, n.service.streams) for n in busy]}")


async def three_stages(room: Room, *, step_ms: float = 2.0) -> None:
    """1, 2, 3 are preferred; 4, 5, 6 are their replicas; 9 is an entry without layers."""
    thirds = (LayerRange(0, 4), LayerRange(4, 8), LayerRange(8, 12))
    for number, layers in enumerate((*thirds, *thirds), 1):
        await room.add(number, layers, step_ms=step_ms)
    await room.add(9, None)


@asynccontextmanager
async def open_room() -> AsyncIterator[Room]:
    async with trio.open_nursery() as nursery:
        yield Room(nursery)
        nursery.cancel_scope.cancel()


def run(test: Callable[[], Any]) -> None:
    """Run a trio test on a clock that jumps over waits."""
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))
