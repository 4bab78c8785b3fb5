"""Where the weights of a range come from: this disk, the neighbours, the model's own source, in this order."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from meshd.errors import LocalError, ModelNotFound, ModelRefused, StoreFull
from meshd.models.pull import pull
from meshd.models.store import ModelStore, StoredModel
from meshd.node.model import Served
from meshd.node.weights import Weights
from meshd.vocabulary import LayerRange
from tests.models.checkpoints import llama_plans, write_model

FRONT, BACK = LayerRange(0, 2), LayerRange(2, 4)


class Neighbours:
    """A fetcher that does what a test says; ``calls`` counts."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.calls = 0

    async def fetch(self, digest: str, layers: LayerRange, progress: Callable[[float], None]) -> None:
        await trio.lowlevel.checkpoint()
        self.calls += 1
        self.act()
        progress(1.0)


@pytest.fixture
def whole(tmp_path: Path) -> StoredModel:
    folder = write_model(tmp_path / "m", llama_plans(), files=4)
    return pull(str(folder), ModelStore.under(tmp_path / "state"))


@pytest.fixture
def lacking(whole: StoredModel, tmp_path: Path) -> Served:
    """The model without the file that holds its last layers; it lies in ``spare``."""
    (tmp_path / "spare").mkdir()
    for number in (3, 4):
        name = f"model-0000{number}-of-00004.safetensors"
        shutil.move(whole.path / name, tmp_path / "spare" / name)
    return Served(whole.spec, whole.path)


def give_back(served: Served, tmp_path: Path) -> None:
    assert served.folder is not None
    for entry in (tmp_path / "spare").iterdir():
        shutil.copy(entry, served.folder / entry.name)


def nobody() -> None:
    raise ModelNotFound("no neighbour that can be reached has it")


def ensure(weights: Weights, served: Served, layers: LayerRange) -> list[float]:
    told: list[float] = []
    trio.run(weights.ensure, served, layers, told.append)
    return told


def test_what_is_here_is_not_fetched(lacking: Served) -> None:
    neighbours = Neighbours(nobody)
    assert ensure(Weights(neighbours, None), lacking, FRONT) == []  # type: ignore[arg-type]  # a fake
    assert neighbours.calls == 0


def test_neighbours_come_first(lacking: Served, tmp_path: Path) -> None:
    neighbours = Neighbours(lambda: give_back(lacking, tmp_path))
    assert ensure(Weights(neighbours, None), lacking, BACK) == [1.0]  # type: ignore[arg-type]  # a fake
    assert neighbours.calls == 1


def test_then_the_models_own_source(lacking: Served, tmp_path: Path) -> None:
    pulled: list[str] = []

    async def source(name: str) -> None:
        await trio.lowlevel.checkpoint()
        pulled.append(name)
        give_back(lacking, tmp_path)

    ensure(Weights(Neighbours(nobody), source), lacking, BACK)  # type: ignore[arg-type]  # a fake
    assert pulled == ["m"]


def test_what_nobody_has_is_named_by_file_and_layer(lacking: Served) -> None:
    async def source(name: str) -> None:
        await trio.lowlevel.checkpoint()
        raise LocalError("no route to the hub")

    for pull_from in (None, source):
        with pytest.raises(ModelRefused, match=r"model-0000[34].*layer [23].*neighbours: no neighbour"):
            ensure(Weights(Neighbours(nobody), pull_from), lacking, BACK)  # type: ignore[arg-type]  # a fake


def test_a_full_disk_is_not_worked_around(lacking: Served) -> None:
    def full() -> None:
        raise StoreFull("the disk is full")

    with pytest.raises(StoreFull):
        ensure(Weights(Neighbours(full), None), lacking, BACK)  # type: ignore[arg-type]  # a fake


def test_a_model_that_was_stored_without_a_file_is_refused_as_it_is(tmp_path: Path) -> None:
    """Case W26: nobody else has that model, so nobody is asked."""
    folder = write_model(tmp_path / "m", llama_plans(), files=4)
    (folder / "model-00004-of-00004.safetensors").unlink()
    model = pull(str(folder), ModelStore.under(tmp_path / "state"))
    neighbours = Neighbours(nobody)
    served = Served(model.spec, model.path)
    ensure(Weights(neighbours, None), served, FRONT)  # type: ignore[arg-type]  # a fake
    with pytest.raises(ModelRefused, match=r"model-00004-of-00004.*layer 3"):
        ensure(Weights(neighbours, None), served, BACK)  # type: ignore[arg-type]  # a fake
    assert neighbours.calls == 0
