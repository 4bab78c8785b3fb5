from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshd.errors import ModelNotFound, ModelRefused, StateError, StoreFull
from meshd.models.digest import make_manifest
from meshd.models.disk import disk_errors
from meshd.models.file_lock import FileLock
from meshd.models.manifest import write_manifest
from meshd.models.store import ModelStore, StoredModel
from tests.models.checkpoints import CONFIG, write_model


def install(store: ModelStore, name: str, **config: object) -> StoredModel:
    with store.new_folder() as folder:
        write_model(folder, config={**CONFIG, **config})
        write_manifest(folder, make_manifest(folder, name, "test", store.hashes))
        return store.install(folder, name)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore.under(tmp_path)


def test_an_installed_model_is_found_under_its_name(store: ModelStore) -> None:
    assert store.models() == []
    model = install(store, "org/name")
    assert [found.name for found in store.models()] == ["org/name"]
    found = store.get("org/name")
    assert found == model
    assert found.spec.name == "org/name"
    assert found.path.parent == store.root
    assert found.open().tensors_of(found.spec.whole)
    assert store.by_digest(model.spec.digest) == model
    assert not [entry for entry in store.root.iterdir() if entry.name.startswith("new-")]


def test_a_dtype_in_the_name_is_a_variant_of_the_same_files(store: ModelStore) -> None:
    model = install(store, "m")
    variant = store.get("m@int8")
    assert variant.path == model.path
    assert (variant.name, variant.spec.name, variant.spec.dtype) == ("m@int8", "m@int8", "int8")
    assert store.by_digest(variant.spec.digest) == variant
    assert store.find("m@int3") is None
    assert store.by_digest("0" * 32) is None


BAD_NAMES = [
    "..",
    ".",
    "",
    "a/../../b",
    "/etc",
    "a\\b",
    "a%2f..%2fb",
    "a" * 300,
    "a\0b",
    "../models",
    "m/..",
    "registry.json",
    "a/b/c",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_is_never_a_path(store: ModelStore, name: str) -> None:
    model = install(store, "m")
    code = "import sys; from pathlib import Path; from meshd.models.store import ModelStore"
    code += (
        "; opened = []; sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)"
    )
    code += f"; found = ModelStore(Path({str(store.root)!r})).find({name!r}); print(found, opened)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.startswith("None ")
    assert "/etc" not in shown
    with pytest.raises(ModelNotFound):
        store.get(name)
    with pytest.raises(ModelNotFound):
        store.remove(name)
    with pytest.raises(ModelRefused), store.new_folder() as folder:
        store.install(folder, name if name != "registry.json" else "hash:3")
    assert store.get("m") == model


def test_a_registry_cannot_point_out_of_the_store(store: ModelStore, tmp_path: Path) -> None:
    model = install(store, "m")
    outside = tmp_path / "outside"
    model.path.rename(outside)
    for folder in ("../../outside", str(outside), "..", "m-../../outside", 3):
        (store.root / "registry.json").write_text(json.dumps({"models": {"m": folder}}))
        assert store.find("m") is None


def test_removing_frees_the_disk_unless_another_name_shares_it(store: ModelStore) -> None:
    first, second = install(store, "a"), install(store, "b")
    assert first.path == second.path
    assert store.remove("a") == 0
    assert store.get("b").path.is_dir()
    assert store.remove("b") > 0
    assert not second.path.exists()
    with pytest.raises(ModelNotFound):
        store.remove("b")


def test_removing_a_variant_costs_nobody_the_model(store: ModelStore) -> None:
    install(store, "m")
    for name in ("m@int8", "m@int9"):
        with pytest.raises(ModelNotFound, match="m has the files of every dtype"):
            store.remove(name)
    assert store.get("m@int8").path.is_dir()


def test_a_new_version_takes_the_name_and_the_old_one_goes(store: ModelStore) -> None:
    old, new = install(store, "m"), install(store, "m", rope_theta=5.0)
    assert old.spec.digest != new.spec.digest
    assert store.get("m") == new
    assert not old.path.exists()


def test_a_damaged_model_is_not_listed_and_can_be_removed(store: ModelStore) -> None:
    model = install(store, "m")
    (model.path / "meshd-manifest.json").write_text("{}")
    assert store.models() == []
    store.remove("m")
    assert not model.path.exists()


@pytest.mark.parametrize("content", [None, "", "[]"])
def test_a_lost_registry_is_rebuilt_from_the_manifests(store: ModelStore, content: str | None) -> None:
    model = install(store, "org/name")
    path = store.root / "registry.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert store.find("org/name") == model


def test_a_failed_build_leaves_nothing(store: ModelStore) -> None:
    def build() -> None:
        with store.new_folder() as folder:
            (folder / "half").write_bytes(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    assert [entry for entry in store.root.iterdir() if entry.is_dir()] == []


def test_a_full_disk_is_store_full(store: ModelStore) -> None:
    with pytest.raises(StoreFull, match="MB short"), store.new_folder(1 << 60):
        pass
    with pytest.raises(StoreFull, match="full"), store.new_folder():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StateError, match="cannot be written"), disk_errors(store.root):
        raise OSError(errno.EROFS, "Read-only file system")


def test_a_failing_disk_is_an_error_that_says_where_and_what_to_do(store: ModelStore) -> None:
    said = r"/card/layer cannot be used \(Input/output error\).*MESHD_STATE_DIR"
    with pytest.raises(StateError, match=said), disk_errors(store.root):
        raise OSError(errno.EIO, "Input/output error", "/card/layer")
    with pytest.raises(StateError, match=f"{store.root} cannot be used"), disk_errors(store.root):
        raise OSError("the file ends at byte 3")
    with pytest.raises(StateError, match="cannot be used"), FileLock(store.root / "no folder" / "lock").held(0.0):
        pass


def test_what_crashed_processes_left_is_swept(store: ModelStore) -> None:
    model = install(store, "m")
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait(timeout=60)
    left = [store.root / f"new-{gone.pid}-x", store.root / f"old-{gone.pid}-x", store.root / ("m-" + "0" * 32)]
    kept = [store.root / f"new-{os.getpid()}-x", store.partial("org/name")]
    for folder in (*left, *kept):
        folder.mkdir(exist_ok=True)
    store.sweep()
    assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in (*kept, model.path))


class _PowerCut(BaseException):
    """Nothing of ours handles it."""


@pytest.mark.parametrize("registry", [True, False])
def test_a_crash_between_the_renames_of_a_replacement_loses_no_model(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, registry: bool
) -> None:
    model = install(store, "m")
    keep = Path.rename

    def cut(path: Path, target: Path) -> Path:
        if target == model.path:
            raise _PowerCut
        return keep(path, target)

    monkeypatch.setattr(Path, "rename", cut)
    with pytest.raises(_PowerCut):
        install(store, "m")
    monkeypatch.undo()
    if not registry:
        (store.root / "registry.json").unlink()
    assert store.find("m") is None
    store.sweep()
    assert store.get("m") == model
    assert [entry.name for entry in store.root.iterdir() if entry.is_dir()] == [model.path.name]


def test_a_replacement_that_the_disk_refuses_leaves_the_old_model(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = install(store, "m")
    keep = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if target == model.path and path.name.startswith("new-"):
            raise OSError(errno.EIO, "Input/output error")
        return keep(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(StateError):
        install(store, "m")
    assert store.get("m") == model


def test_a_sweep_brings_back_no_model_that_was_removed(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    install(store, "a")
    model = install(store, "m", rope_theta=5.0)
    monkeypatch.setattr("shutil.rmtree", lambda *_args, **_more: None)
    store.remove("m")
    monkeypatch.undo()
    store.sweep()
    assert not model.path.exists()
    assert [each.name for each in store.models()] == ["a"]


def test_a_sweep_without_a_registry_removes_no_model(store: ModelStore) -> None:
    """Of two that say the same name, the rebuilt registry has one: the other is not rubbish."""
    models = [install(store, "m"), install(store, "other", rope_theta=5.0)]
    (store.root / "registry.json").write_text("")
    store.sweep()
    assert all(model.path.is_dir() for model in models)


def test_a_lock_is_had_by_one_at_a_time(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    told = threading.Event()
    order: list[str] = []

    def second() -> None:
        with lock.held(30.0, waiting=told.set):
            order.append("second")

    with lock.held(0.0):
        with pytest.raises(StateError, match="held by another"), lock.held(0.0):
            pass
        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_the_daemon_can_use_the_store_without_heavy_libraries() -> None:
    modules = ["store", "digest", "spec", "headers", "anatomy", "manifest", "hash_model", "tensor_hashes", "file_lock"]
    code = "import sys; " + "; ".join(f"import meshd.models.{module}" for module in modules)
    code += "; print([m for m in ('numpy','torch','safetensors','huggingface_hub','gguf','httpx') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.strip() == "[]"
