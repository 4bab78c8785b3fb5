"""Two real workers in a chain of real services over links in memory, on the real clock."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from meshd.chain.drafts import Drafts
from meshd.chain.entry import NewDrafts
from meshd.chain.request import Finished, GenerationRequest, Tokens
from meshd.chain.service import ChainService
from meshd.directory import Directory, Member
from meshd.inference.engine import Choice
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.vocabulary import Advert, LayerRange, ModelSpec, NodeId, NodeStatus
from tests.fakes.links import FakeLinks, FakeNet
from tests.fakes.planner import FakePlanner

OPTIONS = WorkerOptions(threads=1)


@dataclass
class Answered:
    choices: list[Choice]
    finished: Finished


class WorkerRoom:
    """One node a range; the first is the entry."""

    def __init__(self, spec: ModelSpec, engines: Sequence[WorkerEngine], nursery: trio.Nursery) -> None:
        self.net = FakeNet()
        self.drafts: NewDrafts | None = None
        self.engines = engines
        self._spec = spec
        self._nursery = nursery
        self._planner = FakePlanner()
        self._nodes = [NodeId(f"{number:032x}") for number in range(1, len(engines) + 1)]
        adverts = [
            Advert(
                node_id=node,
                name=node[-2:],
                epoch=1,
                incarnation=0,
                addresses=(),
                digest=spec.digest,
                arith=engine.info.arith,
                num_layers=spec.num_layers,
                layers=engine.info.layers,
                generation=1,
            )
            for node, engine in zip(self._nodes, engines, strict=True)
        ]
        members = [Member(advert, state=NodeStatus.ALIVE, admitted=True) for advert in adverts]
        self._directory = Directory(self._nodes[0]).replace(members)
        self._services: list[ChainService] = []

    async def start(self) -> None:
        for node, engine in zip(self._nodes, self.engines, strict=True):
            links = self.net.join(node)
            service = ChainService(
                node,
                links,
                engine=lambda engine=engine: engine,  # type: ignore[misc]  # bound now
                planner=self._planner,
                directory=lambda: self._directory,
                model=lambda: self._spec,
                rng=random.Random(node),
                drafts=self._new_drafts,
            )
            self._services.append(service)
            await self._nursery.start(service.run)
            self._nursery.start_soon(self._serve, service, links)

    def _new_drafts(self, request: GenerationRequest) -> Drafts | None:
        return self.drafts(request) if self.drafts else None

    async def _serve(self, service: ChainService, links: FakeLinks) -> None:
        async for source, first, stream in links.inbound():
            self._nursery.start_soon(service.handle, source, first, stream)

    async def ask(self, request: GenerationRequest) -> Answered:
        choices: list[Choice] = []
        async with self._services[0].generate(request) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    choices += event.choices
                elif isinstance(event, Finished):
                    return Answered(choices, event)
        raise AssertionError("no report")


@asynccontextmanager
async def worker_room(
    folder: Path, spec: ModelSpec, ranges: Sequence[LayerRange], options: WorkerOptions = OPTIONS
) -> AsyncIterator[WorkerRoom]:
    async with trio.open_nursery() as nursery:
        engines = [
            await WorkerEngine.spawn(nursery, folder, spec, layers, generation=1, log=print, options=options)
            for layers in ranges
        ]
        room = WorkerRoom(spec, engines, nursery)
        await room.start()
        try:
            yield room
        finally:
            for engine in engines:
                await engine.aclose()
            nursery.cancel_scope.cancel()
