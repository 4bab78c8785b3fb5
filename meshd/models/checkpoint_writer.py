"""Writes a safetensors file: one tensor at a time, the same bytes on every device.

Owns the layout of files that meshd itself makes. The official writer wants every tensor in memory, knows no bfloat16 without
torch, and orders its header as it likes; a model's identity hangs on these bytes, so here the order is the caller's and the
data starts on a 64-byte boundary (an mmap of it is then aligned for every vector unit). Invariant: bytes depend on the
arguments only. Errors: ModelRefused when a tensor delivers other bytes than it declared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshd.errors import ModelRefused

ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to write: what the header says of it, and where its little-endian bytes come from when its turn is."""

    name: str
    dtype: str  # as safetensors spells it: BF16, F32, ...
    shape: tuple[int, ...]
    size_bytes: int
    load: Callable[[], bytes]


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the data, for ``(name, dtype, shape, size_bytes)`` laid one after the other."""
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offset = 0
    for name, dtype, shape, size_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(path: Path, tensors: Iterable[TensorPlan], written: Callable[[int], None] | None = None) -> None:
    """Write ``tensors`` in their order. ``written`` hears the bytes of data done so far."""
    plans = list(tensors)
    header = encode_header((plan.name, plan.dtype, plan.shape, plan.size_bytes) for plan in plans)
    done = 0
    with path.open("xb") as file:
        file.write(header)
        for plan in plans:
            data = plan.load()
            if len(data) != plan.size_bytes:
                raise ModelRefused(f"{path.name}: {plan.name} has {len(data)} bytes, {plan.size_bytes} were declared")
            file.write(data)
            done += len(data)
            if written is not None:
                written(done)
