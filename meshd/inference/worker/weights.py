"""A checkpoint's tensors: which file holds each, their shapes, and zero-copy views of the bytes.

Owns the reading of ``model.safetensors`` or ``model.safetensors.index.json`` with its parts. Knows nothing of architectures:
which tensors a layer range needs is `placement`'s business. Only the headers of files that hold a wanted tensor are read, and
only the pages of tensors that are touched become resident: several workers on one host share one physical copy.

Files are mapped read-only and must never be rewritten in place (write a new name, then rename). Sizes in bytes. Everything
wrong with a file raises `ModelRefused` naming the file, and the tensor where there is one.
"""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from meshd.errors import ModelRefused

MAX_HEADER_BYTES: Final = 100 << 20  # the format's own limit
TOUCH_BYTES: Final = 32 << 20  # a piece small enough for smooth progress and a bounded temporary

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: byte offsets are from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """One safetensors file: its checked header, and a read-only mapping made at the first view."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_header_untrusted(path)
        self._map: mmap.mmap | None = None

    def view(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file; a copy only where the file misaligns it."""
        entry = self.entries[name]
        count = entry.end - entry.start
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        with warnings.catch_warnings():
            # torch remarks that the mapping is read-only; that is the point of it
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            raw = torch.frombuffer(self._mapped(), dtype=torch.uint8, count=count, offset=entry.start)
        if entry.start % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).reshape(entry.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True when the tensor's bytes are this file's pages and not private memory."""
        if self._map is None:
            return False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            base = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        return base <= tensor.data_ptr() < base + len(self._map)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return self._map


class Checkpoint:
    """A model folder's tensors by name. ``files`` maps each tensor to the name of its file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, TensorFile] = {}
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            self.files = _read_index_untrusted(index)
        elif single.exists():
            self.files = dict.fromkeys(self._file(single.name, "").entries, single.name)
        else:
            raise ModelRefused(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")

    def entry(self, name: str, where: str) -> TensorEntry:
        """The tensor's place; ``where`` (such as "layer 17") goes into the message if it is missing."""
        file = self._file(self.files[name], f"{where}: {name}")
        try:
            return file.entries[name]
        except KeyError:
            raise ModelRefused(f"{file.path} does not hold {name} ({where}), although the index says so") from None

    def view(self, name: str) -> torch.Tensor:
        """A zero-copy view of the tensor."""
        return self._file(self.files[name], name).view(name)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True when the tensor is a view of one of the files."""
        return any(file.holds(tensor) for file in self._open.values())

    def _file(self, name: str, wanted: str) -> TensorFile:
        if name not in self._open:
            path = self.folder / name
            if not path.is_file():
                raise ModelRefused(f"{path} is missing; it holds {wanted}. Pull the model again")
            self._open[name] = TensorFile(path)
        return self._open[name]


def touch(tensors: Iterable[tuple[str, torch.Tensor]], progress: Callable[[float], None]) -> None:
    """Read every byte once: pages them in, and refuses weights that are not finite, naming the tensor.

    Paging in here makes a slow disk part of loading instead of part of the first request.
    """
    todo = [(name, tensor.detach()) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    total = sum(tensor.nbytes for _, tensor in todo) or 1
    done = 0
    for name, tensor in todo:
        for piece in tensor.reshape(-1).split(TOUCH_BYTES // tensor.element_size()):
            # aminmax keeps infinities and NaN, and makes no temporary of the tensor's size
            low, high = torch.aminmax(piece)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise ModelRefused(f"{name} holds weights that are not finite; the checkpoint is damaged")
            done += piece.nbytes
            progress(done / total)


def _read_index_untrusted(path: Path) -> dict[str, str]:
    try:
        document = json.loads(path.read_bytes())
        files = document["weight_map"]
        entries = list(files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelRefused(f"{path} is not a safetensors index: {error}") from None
    for name, file in entries:
        if not isinstance(name, str) or not isinstance(file, str) or not file or Path(file).name != file:
            raise ModelRefused(f"{path}: {name!r} lies in {file!r}, which is not a file of this folder")
    return dict(entries)


def _read_header_untrusted(path: Path) -> dict[str, TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelRefused(f"{path} is not a safetensors file, or is cut short")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        base = 8 + length
        return {
            name: _entry_untrusted(name, fields, base, size)
            for name, fields in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefused(f"{path}: {error}") from None


def _entry_untrusted(name: str, fields: Any, base: int, size: int) -> TensorEntry:
    dtype = _DTYPES.get(fields["dtype"])
    if dtype is None:
        raise ValueError(f"{name} is stored as {fields['dtype']}, which this engine does not compute with")
    shape = tuple(fields["shape"])
    start, end = fields["data_offsets"]
    if not all(type(value) is int and value >= 0 for value in (*shape, start, end)):
        raise ValueError(f"{name} has a malformed header")
    if end - start != prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{name} has {end - start} bytes, its shape {list(shape)} wants {prod(shape) * dtype.itemsize}"
        )
    if base + end > size:
        raise ValueError(f"the file is cut short: {name} ends at byte {base + end} of {size}")
    return TensorEntry(name, dtype, shape, base + start, base + end)
