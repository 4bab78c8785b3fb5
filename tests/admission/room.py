"""A room of rehearsal nodes that probe each other over links in memory, and stages that compute wrongly on purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from meshd.admission.book import VerdictBook
from meshd.admission.expected import Expected, RehearsalModel
from meshd.admission.probe_server import ProbeServer
from meshd.admission.prober import Prober
from meshd.directory import Directory, Member
from meshd.errors import MeshdError, ModelNotFound
from meshd.inference.engine import Engine
from meshd.inference.hash_engine import HashEngine
from meshd.inference.hash_stage import HashStage, HashState
from meshd.models.hash_model import HashModel
from meshd.roster import Roster
from meshd.vocabulary import Advert, Capability, Endpoint, Health, LayerRange, NodeId, NodeStatus
from tests.fakes.links import FakeNet

MODEL = HashModel(12)
SPEC = MODEL.spec


class FaultyStage(HashStage):
    """``fault``: skip, double, swap (layer ``at`` and the next), shift (positions of cached steps), "" for none."""

    def __init__(self, fault: str, at: int = 0, *, seed: int = 0) -> None:
        super().__init__(SPEC.num_layers, seed)
        self._fault, self._at = fault, at

    def extend(self, state: HashState, layers: LayerRange, rows: list[bytes]) -> None:
        if self._fault == "shift" and state.log and len(rows) == 1:
            state.log.append(state.log[-1])  # counts a position too many, then takes it away again
            super().extend(state, layers, rows)
            del state.log[-2]
            return
        keep = self._layer
        order = list(range(len(keep)))
        if self._fault == "swap":
            order[self._at], order[self._at + 1] = order[self._at + 1], order[self._at]
        elif self._fault == "double":
            order[self._at + 1] = self._at
        self._layer = [keep[i] for i in order]
        try:
            if self._fault == "skip":
                self._skipping(state, layers, rows)
            else:
                super().extend(state, layers, rows)
        finally:
            self._layer = keep

    def _skipping(self, state: HashState, layers: LayerRange, rows: list[bytes]) -> None:
        local = self._at - layers.start
        whole, kv = self._layer, state.kv
        self._layer = [*whole[: self._at], *whole[self._at + 1 :]]
        state.kv = [*kv[:local], *kv[local + 1 :]]
        try:
            super().extend(state, LayerRange(layers.start, layers.end - 1), rows)
        finally:
            self._layer, state.kv = whole, kv


class StaleStage(HashStage):
    """Hands a session the keys and values that the one before it left behind."""

    def __init__(self) -> None:
        super().__init__(SPEC.num_layers)
        self._last: HashState | None = None

    def fresh(self, layers: LayerRange) -> HashState:
        state = super().fresh(layers)
        if self._last is not None:
            state.kv = [[digests[-1]] if digests else [] for digests in self._last.kv]
        self._last = state
        return state


def engine_of(layers: LayerRange, stage: HashStage | None = None, *, generation: int = 1) -> HashEngine:
    engine = HashEngine(SPEC, layers, generation=generation)
    if stage is not None:
        engine._stage = stage
        engine._sessions.stage = stage
    return engine


@dataclass
class RoomNode:
    """One node. ``directory`` is set by the room."""

    node_id: NodeId
    engine: Engine | None = None
    epoch: int = 1
    expected: Expected | None = field(default_factory=lambda: RehearsalModel(SPEC.num_layers, 0))
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    entered: bool = True
    claimed_generation: int | None = None  # what an advert that is late says

    def advert(self) -> Advert:
        info = self.engine.info if self.engine else None
        return Advert(
            node_id=self.node_id,
            name=self.node_id[:2],
            epoch=self.epoch,
            incarnation=1,
            addresses=(Endpoint("127.0.0.1", 1),),
            digest=SPEC.digest,
            dtype=info.dtype if info else "",
            num_layers=SPEC.num_layers,
            layers=info.layers if info else None,
            generation=self.claimed_generation or (info.generation if info else 0),
            capability=Capability(layer_ms_64=info.layer_ms_64 if info else 0.0),
        )

    async def expectations(self, digest: str) -> Expected:
        await trio.lowlevel.checkpoint()
        if self.expected is None or digest != SPEC.digest:
            raise ModelNotFound("no qspec of this model")
        return self.expected


class Room:
    """Starts and stops the shells; every node sees every other one."""

    def __init__(self, *nodes: RoomNode, enabled: bool = True) -> None:
        self.net = FakeNet()
        self.nodes = list(nodes)
        self.books = {n.node_id: VerdictBook(n.node_id, enabled=enabled) for n in nodes}
        self.rosters = {n.node_id: Roster(n.node_id, self.books[n.node_id].verdict) for n in nodes}
        self.probers: dict[NodeId, Prober] = {}
        self.servers: dict[NodeId, ProbeServer] = {}
        self.states: dict[NodeId, NodeStatus] = {}

    def directory(self, node: NodeId) -> Directory:
        return self.rosters[node].directory

    def seen(self, by: RoomNode, of: RoomNode) -> Member:
        found = self.directory(by.node_id).get(of.node_id)
        assert found is not None
        return found

    def changed(self) -> None:
        """Everybody hears of everybody's advert."""
        for roster in self.rosters.values():
            self.build(roster)
        for prober in self.probers.values():
            prober.look()

    def build(self, roster: Roster) -> None:
        present = [n for n in self.nodes if n.entered]
        roster.set_peers([Member(n.advert(), self.states.get(n.node_id, NodeStatus.ALIVE)) for n in present])
        me = next(n for n in self.nodes if n.node_id == roster.self_id)
        roster.set_self(me.advert(), Health(), proven=True)
        roster.build()

    @asynccontextmanager
    async def running(self, limit_s: float = 20.0) -> AsyncIterator[None]:
        with trio.fail_after(limit_s):
            async with trio.open_nursery() as nursery:
                for number, node in enumerate(self.nodes):
                    await self._start(nursery, node, number)
                self.changed()
                yield
                nursery.cancel_scope.cancel()

    async def _start(self, nursery: trio.Nursery, node: RoomNode, seed: int) -> None:
        links = self.net.join(node.node_id)
        server = self.servers[node.node_id] = ProbeServer(lambda: node.engine)
        roster = self.rosters[node.node_id]
        self.probers[node.node_id] = prober = Prober(
            self.books[node.node_id],
            links,
            directory=lambda: roster.directory,
            digest=lambda: SPEC.digest,
            expectations=node.expectations,
            rng=Random(seed),
            on_verdict=lambda: self.build(roster),
            on_event=lambda name, fields: node.events.append((name, fields)),
        )

        async def serve() -> None:
            async with trio.open_nursery() as inner:
                async for peer, first, stream in links.inbound():
                    inner.start_soon(answer, peer, first, stream)

        async def answer(peer: NodeId, first: Any, stream: Any) -> None:
            try:
                await server.serve(peer, first, stream)
            except MeshdError as error:
                stream.fail(error)

        nursery.start_soon(serve)
        nursery.start_soon(prober.run)


def node(letter: str, layers: LayerRange | None = None, stage: HashStage | None = None) -> RoomNode:
    engine = engine_of(layers, stage) if layers else None
    return RoomNode(NodeId(letter * 32), engine)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.sleep(0.002)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario)
