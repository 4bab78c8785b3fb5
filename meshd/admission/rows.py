"""Residual rows as bytes and as numbers, without numpy: the daemon has none, and a probe is small.

``fp32`` is what the qspec holds; ``bf16`` and ``fp16`` are what stages send. Little-endian, row-major. Whole buffers go through
C loops (`array`, `struct`, one long integer), never one value at a time in Python: four prompts of sixteen rows of 4,096
values take milliseconds. Errors: BadTensor for sizes that do not match, values that the dtype cannot hold.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from typing import Final

from meshd.errors import BadTensor

VALUE_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}


def decode_untrusted(body: bytes, n: int, hidden_size: int, dtype: str) -> array[float]:
    """``n * hidden_size`` values. They may be anything a float can be; see `all_finite`."""
    values = n * hidden_size
    size = VALUE_BYTES.get(dtype)
    if size is None:
        raise BadTensor(f"residuals of dtype {dtype!r} cannot be compared")
    if len(body) != values * size:
        raise BadTensor(f"{len(body)} bytes are not {n} rows of {hidden_size} {dtype} values")
    if dtype == "fp16":
        return array("f", struct.unpack(f"<{values}e", body))
    if dtype == "bf16":
        wide = bytearray(4 * values)
        wide[2::4], wide[3::4] = body[0::2], body[1::2]
        body = bytes(wide)
    return _floats(body)


def encode(values: bytes, dtype: str) -> bytes:
    """fp32 rows in a stage's dtype, rounded to nearest."""
    if len(values) % 4 or dtype not in VALUE_BYTES:
        raise BadTensor(f"{len(values)} bytes of fp32 cannot become {dtype}")
    if dtype == "bf16":
        return _to_bf16(values)
    if dtype == "fp16":
        floats = _floats(values)
        try:
            return struct.pack(f"<{len(floats)}e", *floats)
        except (OverflowError, ValueError):
            raise BadTensor("a residual that fp16 cannot hold") from None
    return values


def all_finite(values: array[float]) -> bool:
    """False when any value is an infinity or not a number."""
    return all(map(math.isfinite, values))


def relative_error(got: array[float], want: array[float]) -> float:
    """|got - want| / |want|; infinite where nothing or something not finite was wanted or got."""
    norm = math.hypot(*want)
    error = math.dist(got, want) if len(got) == len(want) else math.inf
    return error / norm if norm > 0.0 and math.isfinite(error) and math.isfinite(norm) else math.inf


def relative_errors(got: array[float], want: array[float], n: int) -> list[float]:
    """`relative_error` of each of ``n`` rows."""
    width = len(want) // n
    return [relative_error(got[at : at + width], want[at : at + width]) for at in range(0, n * width, width)]


def _to_bf16(values: bytes) -> bytes:
    """Half of the dropped part is added to every value at once, as one long integer: a carry never leaves a finite value."""
    halves = int.from_bytes(b"\x00\x80\x00\x00" * (len(values) // 4), "little")
    rounded = (int.from_bytes(values, "little") + halves).to_bytes(len(values) + 1, "little")[: len(values)]
    short = bytearray(len(values) // 2)
    short[0::2], short[1::2] = rounded[2::4], rounded[3::4]
    return bytes(short)


def _floats(body: bytes) -> array[float]:
    floats = array("f")
    floats.frombytes(body)
    if sys.byteorder == "big":
        floats.byteswap()
    return floats
