"""Where a node's qspec comes from: its own store, a neighbour, its own recording, in this order."""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from meshd.admission.expected import RecordedModel, RehearsalModel
from meshd.errors import BadTensor, ModelNotFound
from meshd.models.golden import golden_prompts
from meshd.models.pull import pull
from meshd.models.qspec_file import QspecWriter
from meshd.models.store import ModelStore, StoredModel
from meshd.node.expectations import ASK_AGAIN_S, Expectations
from meshd.node.model import Served
from meshd.vocabulary import LayerRange
from tests.admission.room import MODEL, SPEC
from tests.models.checkpoints import llama_plans, write_model


@pytest.fixture
def stored(tmp_path: Path) -> StoredModel:
    return pull(str(write_model(tmp_path / "m", llama_plans())), ModelStore.under(tmp_path / "state"))


def write_qspec(model: StoredModel) -> None:
    spec = model.manifest.spec
    prompts = golden_prompts(spec.vocab_size, ())
    writer = QspecWriter(model.qspec, spec, prompts)
    for number, ids in enumerate(prompts):
        for boundary in range(spec.num_layers + 1):
            values = [1.0 + boundary] * (len(ids) * spec.hidden_size)
            writer.residual(number, boundary, struct.pack(f"<{len(values)}f", *values))
        writer.ends(number, ids, [2.0] * len(ids))


class Node:
    def __init__(self, model: StoredModel, *, neighbour_has: bool = False) -> None:
        self.model = model
        self.log: list[str] = []
        self.asked = 0
        self._neighbour_has = neighbour_has
        served = Served(model.spec, model.path)
        store = ModelStore(model.path.parent)
        self.expected = Expectations(store, lambda: served, self.bring, self.log.append)

    async def bring(self, digest: str) -> None:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        if not self._neighbour_has:
            raise ModelNotFound("no neighbour has a qspec of this model")
        write_qspec(self.model)


def test_the_rehearsal_model_is_computed(tmp_path: Path) -> None:
    async def nobody(digest: str) -> None:
        raise AssertionError("asked for a qspec")

    served = Served(SPEC, rehearsal=MODEL)
    expected = trio.run(Expectations(ModelStore.under(tmp_path), lambda: served, nobody, print), SPEC.digest)
    assert isinstance(expected, RehearsalModel)


def test_the_stores_own_is_read_once(stored: StoredModel) -> None:
    write_qspec(stored)
    node = Node(stored)

    async def scenario() -> None:
        expected = await node.expected(stored.spec.digest)
        assert await node.expected(stored.spec.digest) is expected
        cases = expected.cases(LayerRange(1, 3), "bf16", Random(1))
        assert len(cases) == 5
        assert all(case.rows == b"\0\x40" * (len(case.prompt.ids) * 8) for case in cases), "2.0 as bf16"
        assert all(case.want == struct.pack("<32f", *[4.0] * 32) for case in cases)
        assert expected.cases(LayerRange(0, 3), "int8", Random(1))[0].rows != b""
        with pytest.raises(BadTensor):
            expected.cases(LayerRange(0, 3), "hash", Random(1))

    trio.run(scenario)
    assert node.asked == 0


def test_a_neighbours_is_asked_for(stored: StoredModel) -> None:
    node = Node(stored, neighbour_has=True)
    assert isinstance(trio.run(node.expected, stored.spec.digest), RecordedModel)
    assert node.asked == 1


def test_a_neighbour_is_not_asked_for_every_probe(stored: StoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    node = Node(stored)

    async def scenario() -> None:
        for _ in range(5):
            with pytest.raises(Exception, match="has no qspec here"):
                await node.expected(stored.spec.digest)
        assert node.asked == 1

    trio.run(scenario)


def test_where_nobody_has_one_it_is_recorded_here_once(stored: StoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs the engine extra")
    commands: list[list[str]] = []

    async def recorder(command: list[str], **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if not node.log[1:]:
            raise OSError(errno.ENOMEM, "no memory is left")  # then it is tried again
        commands.append(command)
        write_qspec(stored)
        return SimpleNamespace(returncode=0, stderr=b"")

    monkeypatch.setattr(trio, "run_process", recorder)
    node = Node(stored)

    async def scenario() -> None:
        with trio.fail_after(1000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.expected.run)
                for said in ("no qspec: no memory is left", "the qspec is recorded"):
                    with pytest.raises(ModelNotFound, match="no neighbour"):
                        await node.expected(stored.spec.digest)
                    while not node.log or node.log[-1] != said:
                        await trio.sleep(0.005)
                    await trio.sleep(ASK_AGAIN_S)
                assert isinstance(await node.expected(stored.spec.digest), RecordedModel)
                nursery.cancel_scope.cancel()

    trio.run(scenario, clock=trio.testing.MockClock(rate=100))
    assert [command[-1] for command in commands] == [str(stored.path)]
