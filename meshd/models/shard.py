"""Receives a part of a model, tensor by tensor, and installs it: what a node needs of what its neighbours have.

Owns the files of a shard on their way in. Where the bytes come from is somebody else's: they are believed only after their
SHA-256 is the manifest's, and the manifest only after its digest is the one that was asked for. Blocking, standard library
only; one receiver per store.

Layout: one file per layer, one for the embedding and one for norm and head, each complete or not there; the index names
them all. So a node that takes more layers later adds files, and no byte that a worker maps ever changes; a stored file that a
failing disk or a power cut has damaged counts as not there, and comes again. Tensors are written in
order of offset; how far each has come is noted every few megabytes, and a broken transfer goes on from the note.
Errors: ModelRefused naming the tensor, StoreFull, StateError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshd.errors import ModelRefused
from meshd.models.anatomy import Anatomy, dissect
from meshd.models.checkpoint_writer import encode_header
from meshd.models.disk import disk_errors, flush
from meshd.models.headers import (
    DTYPE_BYTES,
    INDEX_FILE,
    JSON_CAP_BYTES,
    SINGLE_FILE,
    TensorInfo,
    parse_header_untrusted,
    parse_json_untrusted,
    read_capped,
)
from meshd.models.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILES,
    Manifest,
    config_sha256,
    parse_manifest_untrusted,
    tokenizer_sha256,
)
from meshd.models.spec import refuse_unsafe
from meshd.models.store import QSPEC_FILE, ModelStore, StoredModel
from meshd.vocabulary import LayerRange

COMPANIONS: Final = ("config.json", "generation_config.json", *TOKENIZER_FILES, QSPEC_FILE)
"""Files that travel whole, beside the manifest."""

COMPANION_CAP_BYTES: Final = 256 << 20  # a qspec of a large model
_NOTE_EVERY_BYTES: Final = 8 << 20
_NOTES: Final = "progress.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of the shard: bytes ``[have_bytes, size_bytes)`` are still to come, in order."""

    name: str
    size_bytes: int
    have_bytes: int


class IncomingShard:
    """A shard of the model with ``digest``, as far as it has come. Its state is on the disk: begin again after a break."""

    def __init__(self, store: ModelStore, digest: str, manifest_text: bytes, companions: Mapping[str, bytes]) -> None:
        self.manifest = _checked_manifest(manifest_text, digest)
        self._store = store
        self._folder = store.partial(f"digest {digest}")
        self._anatomy = dissect(self.manifest.tensors, self.manifest.spec.num_layers, self.manifest.spec.tied)
        self._tensors, self._headers = _plan_files(self.manifest, self._anatomy)
        self._have = self._read_notes()
        self._unnoted_bytes = 0
        with disk_errors(store.root):
            self._write_companions(manifest_text, companions)

    def names(self, layers: LayerRange | None) -> list[str]:
        """The tensors that serving ``layers`` needs; of no layers: none."""
        return self._anatomy.names(layers) if layers is not None else []

    def wanted(self, layers: LayerRange | None) -> list[Wanted]:
        """Everything that serving ``layers`` needs and neither the store nor an earlier transfer has whole."""
        stored = self._stored_names()
        files = {self._tensors[name].file for name in self.names(layers) if name not in stored}
        return [
            Wanted(tensor.name, tensor.size_bytes, self._have.get(tensor.name, 0))
            for tensor in self._tensors.values()
            if tensor.file in files and self._have.get(tensor.name, -1) != tensor.size_bytes
        ]

    def require_room(self, layers: LayerRange) -> None:
        """Raise StoreFull when what is still wanted does not fit on the disk."""
        self._store.require_room(sum(item.size_bytes - item.have_bytes for item in self.wanted(layers)))

    def write(self, name: str, offset: int, data: bytes) -> bool:
        """Take the next bytes of a tensor; True when it is whole and proven. A whole one with wrong bytes begins anew."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelRefused(f"{self.manifest.spec.name} has no tensor {name[:200]!r}")
        if offset != self._have.get(name, 0) or offset + len(data) > tensor.size_bytes:
            raise ModelRefused(
                f"tensor {name!r}: bytes {offset}..{offset + len(data)} came, "
                f"{self._have.get(name, 0)}..{tensor.size_bytes} are wanted"
            )
        with disk_errors(self._store.root), self._open(tensor.file) as file:
            file.seek(tensor.start + offset)
            file.write(data)
            self._have[name] = offset + len(data)
            self._unnoted_bytes += len(data)
            if self._have[name] < tensor.size_bytes:
                self._note(_NOTE_EVERY_BYTES)
                return False
            file.flush()
            file.seek(tensor.start)
            right = _sha256(file, tensor.size_bytes) == self.manifest.tensors[name].sha256
            if not right:
                del self._have[name]
            self._note(0)
        if not right:
            raise ModelRefused(f"tensor {name!r} came damaged: its SHA-256 is not the manifest's")
        return True

    def install(self, name: str, layers: LayerRange | None) -> StoredModel:
        """Put what ``layers`` need into the store, beside what it has of this model. Without layers: what an entry needs."""
        left = self.wanted(layers)
        if left:
            raise ModelRefused(
                f"{name}: {len(left)} tensors of layers {layers} have not come yet, {left[0].name!r} first"
            )
        present = self._stored_names()
        files = sorted({self._tensors[n].file for n in self.names(layers) if n not in present})
        self._prove(files)
        stored = self._stored()
        if stored is not None:
            with disk_errors(self._store.root):
                self._add(files, stored.path, present)
            self._forget(files)
            return stored
        with self._store.new_folder() as folder:
            for file in files:
                (self._folder / file).replace(folder / file)
            for companion in (*COMPANIONS, MANIFEST_FILE):
                if (self._folder / companion).is_file():
                    shutil.copyfile(self._folder / companion, folder / companion)
            self._write_index(folder, keep={})
            model = self._store.install(folder, name)
        self._forget(files)
        return model

    def _add(self, files: list[str], folder: Path, present: Mapping[str, str]) -> None:
        """Move finished files to those of an installed model. Each is on the disk before it has its name there."""
        for file in files:
            flush(self._folder / file)
            (self._folder / file).replace(folder / file)
        self._write_index(folder, keep=present)
        flush(folder)

    def _prove(self, files: list[str]) -> None:
        """Hash what is on the disk once more: a power cut can keep the note and lose the bytes. The store's cache keeps it."""
        tensors = [tensor for tensor in self._tensors.values() if tensor.file in files]
        with disk_errors(self._store.root):
            found = self._store.hashes.of(self._folder, tensors)
        wrong = [name for name, sha256 in found.items() if sha256 != self.manifest.tensors[name].sha256]
        for name in wrong:
            del self._have[name]
        if wrong:
            with disk_errors(self._store.root):
                self._note(0)
            raise ModelRefused(f"{len(wrong)} tensors are damaged on the disk, {wrong[0]!r} first: fetch them again")

    def _stored(self) -> StoredModel | None:
        return self._store.by_digest(self.manifest.spec.digest)

    def _stored_names(self) -> dict[str, str]:
        """``tensor -> file`` of what the store has of this model already; nothing where its files say nothing of themselves."""
        stored = self._stored()
        if stored is None:
            return {}
        try:
            return {tensor.name: tensor.file for tensor in stored.open().checkpoint.tensors.values()}
        except ModelRefused:  # its index or its only file is damaged
            return {}

    def _write_index(self, folder: Path, keep: Mapping[str, str]) -> None:
        """The index over files that are there and files that may come: replaced as a whole. A single file needs none; one
        that is kept for nothing is damaged, and would hide the index."""
        single = folder / SINGLE_FILE
        if single.is_file() and keep:
            return
        places = {name: keep.get(name, tensor.file) for name, tensor in self._tensors.items()}
        index = json.dumps({"weight_map": places}, indent=1, sort_keys=True).encode()
        _replace(folder / INDEX_FILE, index, lasting=True)
        single.unlink(missing_ok=True)

    def _open(self, file: str) -> Any:
        """A shard file for reading and writing, made with its header and its full length when it is new."""
        path = self._folder / file
        if not path.exists():
            header = self._headers[file]
            draft = path.with_suffix(".new")
            with draft.open("wb") as made:
                made.write(header)
                made.truncate(max(tensor.end for tensor in self._tensors.values() if tensor.file == file))
            draft.replace(path)
        return path.open("r+b")

    def _write_companions(self, manifest_text: bytes, companions: Mapping[str, bytes]) -> None:
        for name, content in companions.items():
            if name not in COMPANIONS or len(content) > COMPANION_CAP_BYTES:
                raise ModelRefused(f"{name[:200]!r} is no part of a model, or too large")
        for name in COMPANIONS:
            if name in companions:
                _replace(self._folder / name, companions[name])
            else:
                (self._folder / name).unlink(missing_ok=True)
        config = parse_json_untrusted(read_capped(self._folder / "config.json", JSON_CAP_BYTES), "config.json")
        refuse_unsafe(config)
        if config_sha256(config) != self.manifest.config_sha256:
            raise ModelRefused("config.json is not the manifest's")
        if tokenizer_sha256(self._folder) != self.manifest.tokenizer_sha256:
            raise ModelRefused("the tokenizer files are not the manifest's")
        _replace(self._folder / MANIFEST_FILE, manifest_text)

    def _read_notes(self) -> dict[str, int]:
        """How far each tensor has come; nothing where the note or the file is gone."""
        notes: dict[str, int] = {}
        with contextlib.suppress(OSError, ModelRefused):
            notes = parse_json_untrusted(read_capped(self._folder / _NOTES, JSON_CAP_BYTES), _NOTES)
        return {
            name: have
            for name, have in notes.items()
            if (tensor := self._tensors.get(name)) is not None
            and type(have) is int
            and 0 < have <= tensor.size_bytes
            and (self._folder / tensor.file).is_file()
        }

    def _note(self, at_least_bytes: int) -> None:
        if self._unnoted_bytes >= at_least_bytes:
            _replace(self._folder / _NOTES, json.dumps(self._have).encode())
            self._unnoted_bytes = 0

    def _forget(self, files: Iterable[str]) -> None:
        gone = set(files)
        self._have = {name: have for name, have in self._have.items() if self._tensors[name].file not in gone}
        if self._have:
            with disk_errors(self._store.root):
                self._note(0)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)


def read_part(folder: Path, tensor: TensorInfo, offset: int, length: int) -> bytes:
    """The other side: bytes ``[offset, offset + length)`` of a stored tensor, fewer at its end."""
    with (folder / tensor.file).open("rb") as file:
        file.seek(tensor.start + offset)
        return file.read(max(0, min(length, tensor.size_bytes - offset)))


def companions_of(model: StoredModel) -> dict[str, bytes]:
    """The other side: the files that travel whole."""
    with disk_errors(model.path.parent):
        return {name: (model.path / name).read_bytes() for name in COMPANIONS if (model.path / name).is_file()}


def _checked_manifest(text: bytes, digest: str) -> Manifest:
    manifest = parse_manifest_untrusted(text)
    if manifest.spec.digest != digest:
        raise ModelRefused(f"a manifest for digest {manifest.spec.digest} came, {digest} was asked for")
    if manifest.missing_files:
        raise ModelRefused(f"the manifest is of a model without {manifest.missing_files[0]}")
    return manifest


def _plan_files(manifest: Manifest, anatomy: Anatomy) -> tuple[dict[str, TensorInfo], dict[str, bytes]]:
    """Where each tensor will lie, and each file's header. Sizes are computed from checked shapes."""
    groups: dict[str, list[str]] = {"embedding.safetensors": list(anatomy.first)}
    for layer, names in enumerate(anatomy.layers):
        groups[f"layer-{layer:05}.safetensors"] = list(names)
    groups["tail.safetensors"] = [name for name in anatomy.last if name not in anatomy.first]
    tensors: dict[str, TensorInfo] = {}
    headers: dict[str, bytes] = {}
    for file, members in groups.items():
        entries = [(name, *_form(name, manifest)) for name in members]
        headers[file] = encode_header(entries)
        size = len(headers[file]) + sum(entry[3] for entry in entries)
        tensors.update({tensor.name: tensor for tensor in parse_header_untrusted(headers[file][8:], file, size)})
    return tensors, headers


def _form(name: str, manifest: Manifest) -> tuple[str, tuple[int, ...], int]:
    record = manifest.tensors[name]
    if record.dtype not in DTYPE_BYTES:
        raise ModelRefused(f"tensor {name!r} has dtype {record.dtype!r}, which is not supported")
    size = DTYPE_BYTES[record.dtype]
    for length in record.shape:
        size *= length
    return record.dtype, record.shape, size


def _sha256(file: Any, size: int) -> str:
    total = hashlib.sha256()
    while size:
        chunk = file.read(min(1 << 20, size))
        if not chunk:
            break
        total.update(chunk)
        size -= len(chunk)
    return total.hexdigest()


def _replace(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """``lasting``: on the disk before it has its name, which costs too much for a note that is soon written again."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    if lasting:
        flush(draft)
    draft.replace(path)
