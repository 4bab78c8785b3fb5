"""Safetensors as a message: a length, a JSON header, raw bytes. Pure, and without numpy, which the daemon never loads.

Owns the format and the residual's element types. Bytes from the network are checked against caps and against each other
before anything is sliced; only `BadTensor` is raised. Element types are safetensors' own names.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeGuard

from meshd.errors import BadTensor

HEADER_CAP_BYTES: Final = 64 * 1024
TENSORS_CAP: Final = 8
DIMENSIONS_CAP: Final = 4

ITEM_BYTES: Final[Mapping[str, int]] = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1}

_RESIDUAL: Final[Mapping[str, str]] = {
    **dict.fromkeys(("bf16", "bfloat16", "int8"), "BF16"),
    **dict.fromkeys(("fp16", "float16", "f16"), "F16"),
    **dict.fromkeys(("fp32", "float32", "f32"), "F32"),
    "hash": "U8",
}

_EXPONENT: Final = {"BF16": ("H", 0x7F80), "F16": ("H", 0x7C00), "F32": ("I", 0x7F800000)}
CHUNK_BYTES: Final = 256 * 1024
"""Conversions and checks go in chunks of this size, so that a caller on an event loop can let others run between them."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """``data`` is row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def residual_dtype(dtype: str) -> str:
    """The element type of the residual of a model whose weights are ``dtype``."""
    return _RESIDUAL.get(dtype, "BF16")


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    return b"".join([struct.pack("<Q", len(text)), text, *(tensor.data for tensor in tensors.values())])


def decode_untrusted(body: bytes) -> dict[str, Tensor]:
    """The tensors in a body. Raises BadTensor."""
    if len(body) < 8:
        raise BadTensor("the body is not safetensors: it has no header length")
    (length,) = struct.unpack_from("<Q", body)
    if length > min(HEADER_CAP_BYTES, len(body) - 8):
        raise BadTensor(f"the body is not safetensors: a header of {length} bytes is more than it has or may have")
    try:
        header = json.loads(body[8 : 8 + length])
    except (ValueError, RecursionError):
        raise BadTensor("the body is not safetensors: its header is not JSON") from None
    if not isinstance(header, dict):
        raise BadTensor("the body is not safetensors: its header is not an object")
    header.pop("__metadata__", None)
    if len(header) > TENSORS_CAP:
        raise BadTensor(f"{len(header)} tensors in the body, at most {TENSORS_CAP} are allowed")
    data = memoryview(body)[8 + length :]
    tensors = {name: _tensor_untrusted(name[:40], entry, data) for name, entry in header.items()}
    if sum(len(tensor.data) for tensor in tensors.values()) != len(data):
        raise BadTensor("the body has bytes that belong to no tensor, or to two")
    return tensors


def _tensor_untrusted(name: str, entry: object, data: memoryview) -> Tensor:
    if not isinstance(entry, dict):
        raise BadTensor(f"tensor {name!r} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BadTensor(f"tensor {name!r} has a dtype that is none of {', '.join(ITEM_BYTES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(shape) > DIMENSIONS_CAP or len(offsets) != 2:
        raise BadTensor(f"tensor {name!r} has no proper shape and data_offsets")
    start, end = offsets
    if not start <= end <= len(data) or end - start != prod(shape) * ITEM_BYTES[dtype]:
        raise BadTensor(
            f"tensor {name!r}: shape {shape} of {dtype} does not fill bytes {start} to {end} of {len(data)}"
        )
    return Tensor(dtype, tuple(shape), bytes(data[start:end]))


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 40 for item in value)


def check_finite(data: bytes, dtype: str) -> None:
    """Raise BadTensor if a float among ``data`` (a whole number of elements) is infinite or not a number."""
    if dtype not in _EXPONENT:
        return
    code, mask = _EXPONENT[dtype]
    if any(word & mask == mask for word in array(code, data)):
        raise BadTensor("hidden has values that are not finite")


def from_f32(data: bytes, dtype: str) -> bytes:
    """float32 elements as ``dtype``, rounded to nearest, ties to even. Raises BadTensor for values beyond its reach."""
    if dtype == "F32":
        return data
    if dtype == "BF16":
        if not any(data[0::4]) and not any(data[1::4]):  # widened bf16, the usual case: the rest is the value
            out = bytearray(len(data) // 2)
            out[0::2], out[1::2] = data[2::4], data[3::4]
            return bytes(out)
        words = array("I", data)
        rounded = array("H", (min((word + 0x7FFF + (word >> 16 & 1)) >> 16, 0xFFFF) for word in words))
        check_finite(rounded.tobytes(), "BF16")
        return rounded.tobytes()
    count = len(data) // 4
    try:
        return struct.pack(f"<{count}e", *struct.unpack(f"<{count}f", data))
    except (OverflowError, struct.error):
        raise BadTensor("hidden has values beyond the reach of float16") from None
