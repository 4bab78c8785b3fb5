"""Makes the manifest of a model folder, and checks a shard against it.

Owns the walk over tensors; identity itself is `meshd.models.manifest`, hashing `meshd.models.tensor_hashes`. A node checks the
tensors of its own layers only: it may hold no others. Blocking (it reads the weights unless the cache knows them): call it in
a thread. Errors: ModelRefused naming file and tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from meshd.errors import ModelRefused
from meshd.models.headers import TensorInfo
from meshd.models.manifest import (
    Manifest,
    TensorRecord,
    config_sha256,
    digest_of,
    read_manifest,
    tokenizer_sha256,
)
from meshd.models.progress import Progress
from meshd.models.spec import open_folder, read_spec
from meshd.models.tensor_hashes import TensorHashes
from meshd.vocabulary import LayerRange


def make_manifest(
    path: Path, name: str, source: str, hashes: TensorHashes, progress: Progress | None = None
) -> Manifest:
    """The manifest of the folder at ``path``. Tensors of missing files are recorded without a hash."""
    folder = open_folder(path)
    checkpoint = folder.checkpoint
    checkpoint.refuse_damaged()
    found = hashes.of(path, checkpoint.tensors.values(), _counter("hash", checkpoint.tensors.values(), progress))
    records = {
        tensor.name: TensorRecord(tensor.file, tensor.dtype, tensor.shape, found[tensor.name])
        for tensor in checkpoint.tensors.values()
    }
    records.update({tensor: TensorRecord(file, "", (), "") for tensor, file in checkpoint.absent.items()})
    config, tokenizer = config_sha256(folder.config), tokenizer_sha256(path)
    spec = read_spec(folder, name, "")
    return Manifest(
        spec=replace(spec, digest=digest_of(config, tokenizer, records, spec.dtype)),
        source=source,
        config_sha256=config,
        tokenizer_sha256=tokenizer,
        tensors=records,
    )


def verify_shard(
    path: Path, layers: LayerRange, hashes: TensorHashes, progress: Progress | None = None
) -> tuple[TensorInfo, ...]:
    """Check config, tokenizer and every tensor that serving ``layers`` needs against the manifest; their headers."""
    manifest = read_manifest(path)
    folder = open_folder(path)
    if config_sha256(folder.config) != manifest.config_sha256:
        raise ModelRefused(f"{path}: config.json is not the one of the manifest; pull the model again")
    if tokenizer_sha256(path) != manifest.tokenizer_sha256:
        raise ModelRefused(f"{path}: the tokenizer files are not those of the manifest; pull the model again")
    tensors = folder.tensors_of(layers)
    for tensor in tensors:
        _check_shape(tensor, manifest)
    found = hashes.of(path, tensors, _counter("verify", tensors, progress))
    for tensor in tensors:
        if found[tensor.name] != manifest.tensors[tensor.name].sha256:
            raise ModelRefused(f"{tensor.file}: tensor {tensor.name!r} is damaged; pull the model again")
    return tensors


def _check_shape(tensor: TensorInfo, manifest: Manifest) -> None:
    record = manifest.tensors.get(tensor.name)
    if record is None or not record.sha256:
        raise ModelRefused(
            f"{tensor.file}: tensor {tensor.name!r} was not there when the model was stored; pull it again"
        )
    if (tensor.dtype, tensor.shape) != (record.dtype, record.shape):
        raise ModelRefused(
            f"{tensor.file}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, "
            f"the manifest says {record.dtype} {list(record.shape)}"
        )


def _counter(stage: str, tensors: Iterable[TensorInfo], progress: Progress | None) -> Callable[[int], None] | None:
    """A running total for ``progress``."""
    if progress is None:
        return None
    total = sum(tensor.size_bytes for tensor in tensors)
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        progress(stage, done, total)

    return add
