"""Refuses weights that are not finite, when a model is stored.

One NaN in a weight turns every answer through its layer into noise; a checkpoint that was cut off while it was written, or saved
after a diverged run, has them. Uses numpy, so only pulls import it. Errors: ModelRefused naming file and tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from meshd.errors import ModelRefused
from meshd.models.headers import TensorInfo

_CHUNK_BYTES: Final = 4 << 20
_EXPONENTS: Final[Mapping[str, tuple[str, int]]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}
"""dtype -> (its bits as an unsigned integer, the exponent's bits: all set means infinite or not a number)."""


def refuse_not_finite(folder: Path, tensors: Iterable[TensorInfo], read_bytes: Callable[[int], None]) -> None:
    """Read ``tensors`` once. ``read_bytes`` hears the size of each when it is done."""
    import numpy as np  # noqa: PLC0415  not for the daemon

    for tensor in tensors:
        form = _EXPONENTS.get(tensor.dtype)
        if form is not None:
            kind, exponent = np.dtype(form[0]), form[1]
            with (folder / tensor.file).open("rb") as file:
                file.seek(tensor.start)
                left = tensor.size_bytes
                while left:
                    values = np.frombuffer(file.read(min(_CHUNK_BYTES, left)), dtype=kind)
                    if ((values & exponent) == exponent).any():
                        raise ModelRefused(f"{tensor.file}: tensor {tensor.name!r} has values that are not finite")
                    left -= values.nbytes
        read_bytes(tensor.size_bytes)
