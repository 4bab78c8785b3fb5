"""Reads what safetensors files say of themselves: names, dtypes, shapes and places of tensors, never the tensors.

Owns the format (8 bytes of length, JSON, data) and the index of a checkpoint in several files. Standard library only: the
daemon uses it. Everything is checked before it is believed, as strictly as the official reader: sizes agree with shapes, no
overlap, no hole, the file ends where the data ends. A file that an index names and that is not there, or is damaged, is no
error here; it is one for whoever needs its tensors (`Checkpoint.need`), because a node may hold only its own part of a model,
and one lost file must not keep it from its other layers, nor from fetching that file again.

Offsets and sizes are bytes, offsets from the start of the file. Errors: ModelRefused naming file and tensor.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

from meshd.errors import ModelRefused

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

DTYPE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}

HEADER_CAP_BYTES: Final = 64 << 20  # 300,000 tensors; the largest mixture-of-experts files have a tenth of it
JSON_CAP_BYTES: Final = 64 << 20
TENSORS_CAP: Final = 500_000
NAME_CAP: Final = 512
DIMENSIONS_CAP: Final = 8
FILES_CAP: Final = 4096

_INSIDE_LAYER: Final = re.compile(r"\.([0-9]{1,6})\.")
_ROTTEN: Final = (errno.EIO, errno.EBADMSG)  # the file cannot be read; no other error says anything of its bytes
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor and where its bytes lie: ``[start, end)`` of ``file``, a plain name inside the model's folder."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All headers of a folder. ``absent`` maps each tensor of a file that is not there, or is damaged, to that file's name;
    ``damaged`` maps the latter to what is wrong with them."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    absent: Mapping[str, str]
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Every tensor that the checkpoint has, there or not, sorted."""
        return sorted({*self.tensors, *self.absent})

    def refuse_damaged(self) -> None:
        """For whoever takes all that is there: a damaged file is not one that was left out."""
        for reason in self.damaged.values():
            raise ModelRefused(reason)

    def need(self, names: Iterable[str]) -> tuple[TensorInfo, ...]:
        """The headers of ``names``, which must be there. The error names the file and what it holds."""
        wanted = list(names)
        lacking = [name for name in wanted if name not in self.tensors]
        if not lacking:
            return tuple(self.tensors[name] for name in wanted)
        file = self.absent.get(lacking[0])
        if file is None:
            raise ModelRefused(f"{self.folder.name}: tensor {lacking[0]!r} is in no file")
        held = sorted(name for name, where in self.absent.items() if where == file)
        missing = self.damaged.get(file, f"{file} is missing from {self.folder}")
        raise ModelRefused(f"{missing}: it holds {_summary(held)}")


def is_plain_file_name(text: str) -> bool:
    """True for a name that cannot leave its folder on any platform."""
    return _FILE_NAME.match(text) is not None


def read_checkpoint(folder: Path) -> Checkpoint:
    """The headers of a model folder: ``model.safetensors``, else the files that the index names."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        tensors = {tensor.name: tensor for tensor in read_header(single)}
        return Checkpoint(folder, tensors, {})
    if not index.is_file():
        raise ModelRefused(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors checkpoints are loaded"
        )
    places = parse_index_untrusted(read_capped(index, JSON_CAP_BYTES), INDEX_FILE)
    found: dict[str, TensorInfo] = {}
    absent: dict[str, str] = {}
    damaged: dict[str, str] = {}
    for file in sorted(set(places.values())):
        named = [name for name, where in places.items() if where == file]
        header = _header_of(folder / file, damaged) if (folder / file).is_file() else None
        if header is None:
            absent.update(dict.fromkeys(named, file))
            continue
        for name in named:
            if name not in header:
                raise ModelRefused(f"{INDEX_FILE} says {file} holds {name!r}, and it does not")
            found[name] = header[name]
    return Checkpoint(folder, found, absent, damaged)


def _header_of(path: Path, damaged: dict[str, str]) -> dict[str, TensorInfo] | None:
    """The tensors of a file by name; None when it is damaged, and why is noted in ``damaged``."""
    try:
        return {tensor.name: tensor for tensor in read_header(path)}
    except ModelRefused as error:
        damaged[path.name] = error.message
    except OSError as error:
        if error.errno not in _ROTTEN:
            raise
        damaged[path.name] = f"{path} cannot be read: {error.strerror}"
    return None


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of one file in the order of their bytes."""
    with path.open("rb") as file:
        size = path.stat().st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, HEADER_CAP_BYTES):
            raise ModelRefused(f"{path.name} is not a safetensors file, or is cut off ({size} bytes)")
        header = file.read(length)
    return parse_header_untrusted(header, path.name, size)


def parse_header_untrusted(header: bytes, file: str, file_bytes: int) -> tuple[TensorInfo, ...]:
    """The tensors that a header declares for a file of ``file_bytes``. Raises only ModelRefused."""
    if len(header) > HEADER_CAP_BYTES:
        raise ModelRefused(f"{file}: a header of {len(header)} bytes is above the limit")
    entries = parse_json_untrusted(header, file)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or len(entries) > TENSORS_CAP:
        raise ModelRefused(f"{file}: the header is not that of a safetensors file")
    base = 8 + len(header)
    tensors = sorted(
        (_tensor(name, entry, file, base) for name, entry in entries.items()), key=lambda t: (t.start, t.end)
    )
    position = base
    for tensor in tensors:
        if tensor.start != position:
            what = "overlaps the one before it" if tensor.start < position else "leaves a hole before it"
            raise ModelRefused(f"{file}: tensor {tensor.name!r} {what}")
        position = tensor.end
    if position != file_bytes:
        raise ModelRefused(f"{file} has {file_bytes} bytes, its header describes {position}: cut off or damaged")
    return tuple(tensors)


def parse_index_untrusted(text: bytes, file: str) -> dict[str, str]:
    """``tensor -> file`` of an index. ``metadata`` and ``total_size`` are of no use and may be absent."""
    places = parse_json_untrusted(text, file).get("weight_map")
    if not isinstance(places, dict) or not places or len(places) > TENSORS_CAP:
        raise ModelRefused(f"{file} has no weight_map")
    for name, where in places.items():
        if not isinstance(where, str) or not is_plain_file_name(where) or not where.endswith(".safetensors"):
            raise ModelRefused(
                f"{file}: tensor {name[:NAME_CAP]!r} is placed in {where!r}, not a safetensors file of this folder"
            )
    if len(set(places.values())) > FILES_CAP:
        raise ModelRefused(f"{file} names more than {FILES_CAP} files")
    return places


def parse_json_untrusted(text: bytes, file: str) -> dict[str, Any]:
    """A JSON object without repeated keys and without NaN. Raises only ModelRefused."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{file} is not a JSON object")
    return value


def read_capped(path: Path, cap_bytes: int) -> bytes:
    """A small file's bytes. Raises ModelRefused when it is missing or above the cap."""
    try:
        with path.open("rb") as file:
            data = file.read(cap_bytes + 1)
    except FileNotFoundError:
        raise ModelRefused(f"{path.name} is missing from {path.parent}") from None
    if len(data) > cap_bytes:
        raise ModelRefused(f"{path.name} is larger than {cap_bytes} bytes")
    return data


def _tensor(name: str, entry: Any, file: str, base: int) -> TensorInfo:
    shown = name[:NAME_CAP]
    if not name or len(name) > NAME_CAP or not name.isprintable():
        raise ModelRefused(f"{file}: {shown!r} is not a tensor name")
    if not isinstance(entry, dict):
        raise ModelRefused(f"{file}: tensor {shown!r} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ModelRefused(f"{file}: tensor {shown!r} has dtype {dtype!r}, which is not supported")
    if not (_naturals(shape) and len(shape) <= DIMENSIONS_CAP and _naturals(offsets) and len(offsets) == 2):
        raise ModelRefused(f"{file}: tensor {shown!r} has a damaged shape or offsets")
    size = DTYPE_BYTES[dtype]
    for length in shape:
        size *= length
    if offsets[1] - offsets[0] != size:
        raise ModelRefused(f"{file}: tensor {shown!r} of {dtype} {shape} takes {size} bytes, {offsets} were given")
    return TensorInfo(name, file, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _summary(names: list[str]) -> str:
    """``layer 15, layer 16`` and other tensors by name, few enough for one line."""
    layers = {int(match[1]) for name in names if (match := _INSIDE_LAYER.search(f".{name}"))}
    others = [name for name in names if not _INSIDE_LAYER.search(f".{name}")]
    shown = [f"layer {layer}" for layer in sorted(layers)][:40] + others[:4]
    return ", ".join(shown) + (" ..." if len(shown) < len(layers) + len(others) else "")
