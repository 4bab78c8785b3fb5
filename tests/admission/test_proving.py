"""A node puts its own engine to the probe first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing

from meshd.errors import EngineFailed, ModelNotFound
from meshd.inference.engine import Engine
from meshd.inference.hash_engine import HashEngine
from meshd.inference.hash_stage import HashStage
from meshd.models.store import ModelStore
from meshd.node.expectations import Expectations
from meshd.node.model import Served
from meshd.node.proving import ProvingLoader
from meshd.vocabulary import LayerRange, NodeId
from tests.admission.room import MODEL, SPEC, FaultyStage, engine_of, run

ME = NodeId("a" * 32)
LAYERS = LayerRange(4, 12)


class Node:
    """A loader whose engines have ``stage``, and what the keeper was told."""

    def __init__(
        self, state: Path, stage: HashStage | None = None, *, served: bool = True, enabled: bool = True
    ) -> None:
        self.told: list[tuple[str, float]] = []
        self.log: list[str] = []
        self.engines: list[HashEngine] = []
        self._stage = stage
        model = Served(SPEC, rehearsal=MODEL) if served else None
        expectations = Expectations(ModelStore.under(state), lambda: model, self.bring, self.log.append)
        self._load = ProvingLoader(self.make, ME, expectations, enabled=enabled, rng=Random(1), log=self.log.append)

    async def bring(self, digest: str) -> None:
        await trio.lowlevel.checkpoint()
        raise ModelNotFound("no neighbour has a qspec of this model")

    async def make(self, layers: LayerRange, generation: int, progress: Callable[[str, float], None]) -> Engine:
        await trio.lowlevel.checkpoint()
        progress("loading", 1.0)
        self.engines.append(engine_of(layers, self._stage, generation=generation))
        return self.engines[-1]

    async def load(self) -> Engine:
        return await self._load(LAYERS, 3, lambda stage, share: self.told.append((stage, share)))


def test_an_honest_engine_is_handed_on_after_proving(tmp_path: Path) -> None:
    node = Node(tmp_path)

    async def scenario() -> None:
        engine = await node.load()
        assert engine is node.engines[0]
        assert engine.health().alive
        assert engine.health().sessions == 0

    run(scenario)
    assert node.told == [("loading", 1.0), ("proving", 0.0), ("proving", 1.0)]
    assert node.log == []


def test_a_broken_engine_is_closed_and_said(tmp_path: Path) -> None:
    node = Node(tmp_path, FaultyStage("skip", 5))

    async def scenario() -> None:
        with pytest.raises(EngineFailed, match=r"this node computes layers 4\.\.12 wrongly"):
            await node.load()
        assert not node.engines[0].health().alive

    run(scenario)


def test_an_engine_that_hangs_is_closed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)

    async def hang(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(HashEngine, "run", hang)

    async def scenario() -> None:
        with pytest.raises(EngineFailed, match="did not answer this node's own probe in 60 s"):
            await node.load()
        assert not node.engines[0].health().alive

    trio.run(scenario, clock=trio.testing.MockClock(rate=1000.0))


def test_without_a_qspec_it_is_used_unproven_and_the_log_says_so(tmp_path: Path) -> None:
    node = Node(tmp_path, served=False)

    async def scenario() -> None:
        assert (await node.load()).health().alive

    run(scenario)
    assert len(node.log) == 1
    assert "not proven" in node.log[0]
    assert "no neighbour has a qspec" in node.log[0]


def test_with_admission_off_nothing_is_proven(tmp_path: Path) -> None:
    node = Node(tmp_path, FaultyStage("skip", 5), enabled=False)
    run(node.load)  # type: ignore[arg-type]  # the engine is of no interest
    assert node.told == [("loading", 1.0)]
