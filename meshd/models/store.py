"""The model store: folders of installed models and the registry that maps names to them.

Layout under the root (``<state-dir>/models``)::

    registry.json      name -> folder
    m-<digest>/        one installed model, never changed after its rename into place
    new-PID-*, old-PID-*  folders on their way in or out; a sweep removes what crashed processes left
    partial/<hash>/    what a broken pull has so far
    hashes.json        tensor hashes (a cache)
    *.lock             held while the registry changes, or while a source is pulled

Invariants: a name is looked up, never used as a path; a model is installed by one rename, so it is there whole or not at
all; bytes of an installed file never change, removal unlinks them (a worker that maps them keeps them). Blocking, standard
library only. Errors: ModelNotFound, ModelRefused, StoreFull, StateError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from meshd.errors import ModelNotFound, ModelRefused, StateError, StoreFull
from meshd.models.disk import disk_errors, flush
from meshd.models.file_lock import FileLock
from meshd.models.manifest import DTYPES, MANIFEST_FILE, Manifest, as_dtype, read_manifest
from meshd.models.spec import ModelFolder, open_folder
from meshd.models.tensor_hashes import TensorHashes
from meshd.vocabulary import MB, ModelSpec, is_model_name

QSPEC_FILE: Final = "qspec.safetensors"
_SPARE_BYTES: Final = 64 * MB  # room that an install leaves on the disk


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store, under the name it was asked for (``@dtype`` included: then ``spec`` is that variant's)."""

    name: str
    path: Path
    spec: ModelSpec
    manifest: Manifest

    @property
    def qspec(self) -> Path:
        """Where its qspec is, or would be."""
        return self.path / QSPEC_FILE

    @property
    def disk_bytes(self) -> int:
        return _disk_bytes(self.path)

    def open(self) -> ModelFolder:
        """Its config and tensor headers. Raises ModelRefused, StateError."""
        with disk_errors(self.path.parent):
            return open_folder(self.path)


class ModelStore:
    """Installed models under one root, shared by every process of this device."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hashes = TensorHashes(root / "hashes.json")

    @classmethod
    def under(cls, state_dir: Path) -> ModelStore:
        """The store of a state folder."""
        return cls(state_dir / "models")

    def models(self) -> list[StoredModel]:
        """Everything installed and readable, by name."""
        return [model for name in sorted(self._registry()) if (model := self._read(name)) is not None]

    def find(self, name: str) -> StoredModel | None:
        """The model of that name, ``@dtype`` allowed; None when there is none or the text is no model name.

        Reads and checks the manifest (milliseconds; a tenth of a second with 50,000 tensors): keep the answer.
        """
        if not is_model_name(name):
            return None
        base, _, dtype = name.partition("@")
        model = self._read(base)
        if model is None or not dtype:
            return model
        if dtype not in DTYPES:
            return None
        return replace(model, name=name, spec=replace(as_dtype(model.spec, dtype), name=name))

    def get(self, name: str) -> StoredModel:
        """`find`, or ModelNotFound saying how to get it."""
        model = self.find(name)
        if model is not None:
            return model
        if not is_model_name(name):
            raise ModelNotFound(f"{name[:200]!r} is not a model name")
        base, _, dtype = name.partition("@")
        if dtype and dtype not in DTYPES:
            raise ModelNotFound(f"no model {name!r}: {dtype!r} is not one of {', '.join(DTYPES)}")
        raise ModelNotFound(f"no model {name!r} in {self.root}: 'meshd pull {base}' fetches it")

    def by_digest(self, digest: str) -> StoredModel | None:
        """The model with that digest, be it a variant's."""
        for model in self.models():
            if model.spec.digest == digest:
                return model
            for dtype in DTYPES:
                if as_dtype(model.spec, dtype).digest == digest:
                    return self.find(f"{model.name}@{dtype}")
        return None

    def remove(self, name: str) -> int:
        """Forget a model, a damaged one too, and unlink its files. The bytes freed (0 when another name shares them). A variant
        (``@dtype``) has no files: ModelNotFound, so that nobody loses the model that it is computed from."""
        with self._changing():
            registry = self._registry()
            if name not in registry:
                base, variant, _ = name[:200].partition("@")
                hint = f"{base} has the files of every dtype" if variant and base in registry else "see `meshd models`"
                raise ModelNotFound(f"no model {name[:200]!r} in {self.root}: {hint}")
            folder = self.root / registry.pop(name)
            self._write_registry(registry)
            if folder.name in registry.values():
                return 0
            freed = _disk_bytes(folder)
            self._discard(folder)
        return freed

    @contextlib.contextmanager
    def new_folder(self, needed_bytes: int = 0) -> Iterator[Path]:
        """An empty folder to build a model in; gone afterwards unless `install` took it. A full disk is StoreFull."""
        self._make_root()
        self.require_room(needed_bytes)
        folder = Path(tempfile.mkdtemp(prefix=f"new-{os.getpid()}-", dir=self.root))
        try:
            with disk_errors(self.root):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def install(self, folder: Path, name: str) -> StoredModel:
        """Take a finished folder (with its manifest) under ``name``: one rename, after its files are on the disk."""
        if not is_model_name(name) or "@" in name or ":" in name:
            raise ModelRefused(f"{name[:200]!r} cannot name a stored model")
        manifest = read_manifest(folder)
        target = self.root / f"m-{manifest.spec.digest}"
        for entry in (*folder.iterdir(), folder):
            flush(entry)
        with self._changing():
            registry = self._registry()
            former = registry.get(name)
            if target.exists():
                _keep_qspec(target, folder)
                self._replace(target, folder)
            else:
                folder.rename(target)
            flush(self.root)
            registry[name] = target.name
            self._write_registry(registry)
            if former is not None and former not in registry.values():
                self._discard(self.root / former)
        return self.get(name)

    def add_qspec(self, model: StoredModel, qspec: Path) -> None:
        """Put a newly recorded qspec beside an installed model: by rename, as everything here."""
        with disk_errors(self.root):
            draft = model.path / f".{QSPEC_FILE}.{os.getpid()}"
            shutil.copyfile(qspec, draft)
            flush(draft)
            draft.replace(model.qspec)
            flush(model.path)

    def partial(self, source: str) -> Path:
        """The folder where a pull of ``source`` keeps what it has; the same one after a break."""
        self._make_root()
        folder = self.root / "partial" / hashlib.sha256(source.encode()).hexdigest()[:24]
        with disk_errors(self.root):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def pull_lock(self, source: str) -> FileLock:
        """Held while ``source`` is pulled: a second pull waits and then finds the model."""
        self._make_root()
        return FileLock(self.root / f"pull-{hashlib.sha256(source.encode()).hexdigest()[:24]}.lock")

    def require_room(self, needed_bytes: int) -> None:
        """Raise StoreFull when ``needed_bytes`` and a little more are not free."""
        with disk_errors(self.root):
            free = shutil.disk_usage(self.root).free
        if needed_bytes and free < needed_bytes + _SPARE_BYTES:
            short = (needed_bytes + _SPARE_BYTES - free + MB - 1) // MB
            raise StoreFull(
                f"{self.root}: {needed_bytes // MB} MB are needed and {free // MB} MB are free ({short} MB short)"
            )

    def sweep(self) -> None:
        """Put back what a crash caught between two renames; remove what crashed pulls and removals left behind: folders of
        processes that are gone, and unregistered models. Called when a daemon starts and before each pull."""
        if not self.root.is_dir():
            return
        with self._changing():
            written = self._written_registry()
            used = set(written.values()) if written is not None else None
            for entry in list(self.root.iterdir()):
                if entry.name.startswith("old-"):
                    self._put_back(entry, used)
                if entry.is_dir() and _is_left_over(entry.name, used):
                    shutil.rmtree(entry, ignore_errors=True)

    def _put_back(self, away: Path, used: set[str] | None) -> None:
        """A model that was on its way out when its successor had not come in yet. Under the lock nobody else moves one."""
        try:
            folder = self.root / f"m-{read_manifest(away / 'model').spec.digest}"
        except (ModelRefused, OSError):
            return
        if (used is None or folder.name in used) and not folder.exists():
            (away / "model").rename(folder)
            flush(self.root)

    def _read(self, name: str) -> StoredModel | None:
        folder = self._registry().get(name)
        if folder is None:
            return None
        path = self.root / folder
        try:
            manifest = read_manifest(path)
        except (ModelRefused, OSError):
            return None
        return StoredModel(name, path, replace(manifest.spec, name=name), manifest)

    def _registry(self) -> dict[str, str]:
        """``name -> folder``. Only folders of this store's own making are believed."""
        written = self._written_registry()
        return self._rebuilt() if written is None else written

    def _written_registry(self) -> dict[str, str] | None:
        """The registry as its file has it; None when that is lost or damaged."""
        try:
            document = json.loads((self.root / "registry.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise StateError(f"the model registry {self.root / 'registry.json'} cannot be read: {error}") from error
        entries = document.get("models") if isinstance(document, dict) else None
        if not isinstance(entries, dict):
            return None
        return {name: folder for name, folder in entries.items() if _is_entry(name, folder)}

    def _rebuilt(self) -> dict[str, str]:
        """The registry from the manifests, when its file is lost or damaged."""
        found: dict[str, str] = {}
        for manifest_file in sorted(self.root.glob(f"m-*/{MANIFEST_FILE}")):
            with contextlib.suppress(ModelRefused, OSError):
                name = read_manifest(manifest_file.parent).spec.name
                if _is_entry(name, manifest_file.parent.name):
                    found[name] = manifest_file.parent.name
        return found

    def _write_registry(self, registry: dict[str, str]) -> None:
        draft = self.root / f"registry.json.{os.getpid()}"
        with disk_errors(self.root):
            draft.write_bytes(json.dumps({"format": 1, "models": registry}, indent=1, sort_keys=True).encode())
            flush(draft)
            draft.replace(self.root / "registry.json")
            flush(self.root)

    def _discard(self, folder: Path) -> None:
        """Away from its name at once, then unlinked."""
        if folder.is_dir():
            self._replace(folder, None)

    def _replace(self, folder: Path, successor: Path | None) -> None:
        away = Path(tempfile.mkdtemp(prefix=f"old-{os.getpid()}-", dir=self.root))
        folder.rename(away / "model")
        if successor is not None:
            try:
                successor.rename(folder)
            except OSError:
                (away / "model").rename(folder)
                raise
            flush(self.root)  # before the old files go: a power cut leaves one of the two
        shutil.rmtree(away, ignore_errors=True)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._make_root()
        with disk_errors(self.root), FileLock(self.root / "registry.lock").held(timeout_s=30.0):
            yield

    def _make_root(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(
                f"the model store {self.root} cannot be made: {error} (MESHD_STATE_DIR: another place)"
            ) from error


def _keep_qspec(old: Path, new: Path) -> None:
    """The digest is the same, so what was recorded of the old copy holds for the new one."""
    if (old / QSPEC_FILE).is_file() and not (new / QSPEC_FILE).exists():
        shutil.copyfile(old / QSPEC_FILE, new / QSPEC_FILE)
        flush(new / QSPEC_FILE)
        flush(new)


def _disk_bytes(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    return sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())


def _is_entry(name: Any, folder: Any) -> bool:
    if not isinstance(name, str) or not isinstance(folder, str) or not is_model_name(name):
        return False
    return folder.startswith("m-") and folder[2:].isalnum() and folder.isascii()


def _is_left_over(name: str, used: set[str] | None) -> bool:
    """``used``: the folders that the registry names; without one (None) no model is removed, as it may be somebody's."""
    kind, _, rest = name.partition("-")
    if kind == "m":
        return used is not None and name not in used
    owner = rest.partition("-")[0]
    if kind == "old":
        return owner.isdigit()  # under the registry's lock nobody is at work on it, even if the number lives again
    return kind == "new" and owner.isdigit() and not _is_running(int(owner))


def _is_running(pid: int) -> bool:
    """True for a live process, and wherever that cannot be asked without harm (Windows: signal 0 kills)."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
