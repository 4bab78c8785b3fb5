from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from meshd.errors import ModelRefused, StateError
from meshd.models.digest import verify_shard
from meshd.models.manifest import MANIFEST_FILE
from meshd.models.pull import pull
from meshd.models.shard import IncomingShard, companions_of, read_part
from meshd.models.store import ModelStore, StoredModel
from meshd.vocabulary import LayerRange
from tests.models.checkpoints import CONFIG, llama_plans, write_model

WHOLE = LayerRange(0, 4)


@pytest.fixture
def neighbour(tmp_path: Path) -> StoredModel:
    """Somebody who has the whole model, in files of another cut, with a tied head."""
    folder = write_model(tmp_path / "m", llama_plans(tied=True), {**CONFIG, "tie_word_embeddings": True}, files=3)
    return pull(str(folder), ModelStore.under(tmp_path / "neighbour"), record=_record)


def _record(folder: Path) -> None:
    (folder / "qspec.safetensors").write_bytes(b"recorded")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore.under(tmp_path / "state")


def begin(store: ModelStore, neighbour: StoredModel) -> IncomingShard:
    text = (neighbour.path / MANIFEST_FILE).read_bytes()
    return IncomingShard(store, neighbour.spec.digest, text, companions_of(neighbour))


def transfer(shard: IncomingShard, neighbour: StoredModel, layers: LayerRange, step: int = 100) -> int:
    """Everything that is wanted, in small pieces; the bytes moved."""
    held = {tensor.name: tensor for tensor in neighbour.open().tensors_of(WHOLE)}
    moved = 0
    for item in shard.wanted(layers):
        at = item.have_bytes
        while at < item.size_bytes:
            data = read_part(neighbour.path, held[item.name], at, step)
            shard.write(item.name, at, data)
            at += len(data)
            moved += len(data)
    return moved


@pytest.mark.parametrize("layers", [LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 4), WHOLE])
def test_only_the_layers_asked_for_come(neighbour: StoredModel, store: ModelStore, layers: LayerRange) -> None:
    shard = begin(store, neighbour)
    assert transfer(shard, neighbour, layers) == neighbour.spec.weight_bytes(layers)
    model = shard.install("m", layers)
    assert model.spec == neighbour.spec
    assert model.manifest == neighbour.manifest
    assert model.qspec.read_bytes() == b"recorded"
    assert verify_shard(model.path, layers, store.hashes)
    assert model.open().held() == (layers,)
    assert list((store.root / "partial").iterdir()) == []


def test_more_layers_are_added_beside_and_nothing_held_comes_again(neighbour: StoredModel, store: ModelStore) -> None:
    shard = begin(store, neighbour)
    transfer(shard, neighbour, LayerRange(0, 2))
    first = shard.install("m", LayerRange(0, 2))
    before = {entry.name: entry.stat().st_ino for entry in first.path.glob("layer-*.safetensors")}
    shard = begin(store, neighbour)
    moved = transfer(shard, neighbour, WHOLE)
    assert moved == neighbour.spec.weight_bytes(WHOLE) - neighbour.spec.weight_bytes(LayerRange(0, 2))
    model = shard.install("m", WHOLE)
    assert model.path == first.path
    assert verify_shard(model.path, WHOLE, store.hashes)
    assert (
        before.items() <= {entry.name: entry.stat().st_ino for entry in model.path.glob("layer-*.safetensors")}.items()
    )


def test_a_shard_completes_a_model_that_was_pulled_with_a_file_missing(
    neighbour: StoredModel, store: ModelStore
) -> None:
    shard = begin(store, neighbour)
    transfer(shard, neighbour, WHOLE)
    model = shard.install("m", WHOLE)
    (model.path / "layer-00002.safetensors").unlink()
    shard = begin(store, neighbour)
    assert {item.name.split(".")[2] for item in shard.wanted(WHOLE)} == {"2"}
    transfer(shard, neighbour, WHOLE)
    assert verify_shard(shard.install("m", WHOLE).path, WHOLE, store.hashes)


def test_a_broken_transfer_goes_on(neighbour: StoredModel, store: ModelStore) -> None:
    shard = begin(store, neighbour)
    first, second = shard.wanted(WHOLE)[:2]
    held = {tensor.name: tensor for tensor in neighbour.open().tensors_of(WHOLE)}
    assert shard.write(first.name, 0, read_part(neighbour.path, held[first.name], 0, first.size_bytes))
    assert not shard.write(second.name, 0, read_part(neighbour.path, held[second.name], 0, 10))
    shard = begin(store, neighbour)
    assert first.name not in {item.name for item in shard.wanted(WHOLE)}
    transfer(shard, neighbour, WHOLE)
    assert verify_shard(shard.install("m", WHOLE).path, WHOLE, store.hashes)


def test_wrong_bytes_are_refused_and_asked_for_again(neighbour: StoredModel, store: ModelStore) -> None:
    shard = begin(store, neighbour)
    first = shard.wanted(WHOLE)[0]
    with pytest.raises(ModelRefused, match="came damaged"):
        shard.write(first.name, 0, b"\1" * first.size_bytes)
    assert shard.wanted(WHOLE)[0] == first
    with pytest.raises(ModelRefused, match="are wanted"):
        shard.write(first.name, 5, b"x")
    with pytest.raises(ModelRefused, match="are wanted"):
        shard.write(first.name, 0, b"x" * (first.size_bytes + 1))
    with pytest.raises(ModelRefused, match="no tensor"):
        shard.write("../../x", 0, b"x")
    with pytest.raises(ModelRefused, match="have not come"):
        shard.install("m", WHOLE)
    assert store.models() == []


def test_bytes_lost_in_a_power_cut_are_noticed(neighbour: StoredModel, store: ModelStore) -> None:
    shard = begin(store, neighbour)
    transfer(shard, neighbour, WHOLE)
    lost = store.partial(f"digest {neighbour.spec.digest}") / "layer-00002.safetensors"
    size = lost.stat().st_size
    lost.write_bytes(lost.read_bytes()[:-10] + bytes(10))
    assert lost.stat().st_size == size
    with pytest.raises(ModelRefused, match="damaged on the disk"):
        shard.install("m", WHOLE)
    assert [item.name.split(".")[2] for item in shard.wanted(WHOLE)] == ["2"]
    transfer(shard, neighbour, WHOLE)
    assert verify_shard(shard.install("m", WHOLE).path, WHOLE, store.hashes)


def test_a_manifest_or_config_of_another_model_is_refused(neighbour: StoredModel, store: ModelStore) -> None:
    text = (neighbour.path / MANIFEST_FILE).read_bytes()
    companions = companions_of(neighbour)
    with pytest.raises(ModelRefused, match="asked for"):
        IncomingShard(store, "0" * 32, text, companions)
    for change, said in (
        ({"config.json": b"{}"}, r"config\.json"),
        ({"tokenizer.json": b"{}"}, "tokenizer"),
        ({"../evil": b""}, "no part of a model"),
        ({"pytorch_model.bin": b""}, "no part of a model"),
    ):
        with pytest.raises(ModelRefused, match=said):
            IncomingShard(store, neighbour.spec.digest, text, {**companions, **change})


def test_files_added_to_a_model_are_on_the_disk_before_they_have_their_names(
    neighbour: StoredModel, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a renamed file empty."""
    shard = begin(store, neighbour)
    transfer(shard, neighbour, LayerRange(0, 2))
    folder = shard.install("m", LayerRange(0, 2)).path
    shard = begin(store, neighbour)
    transfer(shard, neighbour, WHOLE)
    flushed: list[int] = []
    renamed: dict[str, bool] = {}  # whether it was on the disk by then
    fsync, replace = os.fsync, Path.replace

    def flushing(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def renaming(path: Path, target: Path) -> Path:
        if target.parent == folder:
            renamed[target.name] = flushed[-1:] == [path.stat().st_ino]
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(Path, "replace", renaming)
    shard.install("m", WHOLE)
    added = ["layer-00002.safetensors", "layer-00003.safetensors", "model.safetensors.index.json", "tail.safetensors"]
    assert renamed == dict.fromkeys(added, True)
    assert flushed[-1] == folder.stat().st_ino


@pytest.mark.parametrize("left", [b"", b"\0" * 500], ids=["empty", "zeros"])
def test_a_damaged_file_costs_its_layer_and_comes_again(neighbour: StoredModel, store: ModelStore, left: bytes) -> None:
    shard = begin(store, neighbour)
    transfer(shard, neighbour, WHOLE)
    model = shard.install("m", WHOLE)
    (model.path / "layer-00003.safetensors").write_bytes(left)
    assert model.open().held() == (LayerRange(0, 3),)
    with pytest.raises(ModelRefused, match=r"layer-00003\.safetensors is not .*layer 3"):
        model.open().tensors_of(WHOLE)
    shard = begin(store, neighbour)
    assert {item.name.split(".")[2] for item in shard.wanted(WHOLE)} == {"3"}
    transfer(shard, neighbour, WHOLE)
    assert verify_shard(shard.install("m", WHOLE).path, WHOLE, store.hashes)


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "model.safetensors"])
def test_a_model_whose_only_index_is_damaged_comes_again(
    neighbour: StoredModel, tmp_path: Path, store: ModelStore, file: str
) -> None:
    if file == "model.safetensors":
        source = write_model(tmp_path / "one" / "m", llama_plans(tied=True), {**CONFIG, "tie_word_embeddings": True})
        model = pull(str(source), store)
    else:
        shard = begin(store, neighbour)
        transfer(shard, neighbour, WHOLE)
        model = shard.install("m", WHOLE)
    assert model.spec.digest == neighbour.spec.digest
    (model.path / file).write_bytes(b"")
    shard = begin(store, neighbour)
    transfer(shard, neighbour, WHOLE)
    assert verify_shard(shard.install("m", WHOLE).path, WHOLE, store.hashes)


def test_a_file_that_a_disk_does_not_give_is_a_damaged_one(
    neighbour: StoredModel, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = begin(store, neighbour)
    transfer(shard, neighbour, WHOLE)
    model = shard.install("m", WHOLE)
    keep, number = Path.open, errno.EIO

    def failing(path: Path, *args: object, **more: object) -> object:
        if path.name == "layer-00001.safetensors":
            raise OSError(number, os.strerror(number), str(path))
        return keep(path, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", failing)
    assert model.open().held() == (LayerRange(0, 1), LayerRange(2, 4))
    number = errno.EMFILE  # says nothing of the file
    with pytest.raises(StateError, match=r"layer-00001.*Too many open files"):
        model.open()
