"""Rows as bytes and as tensors. Owns the check that a body is what its head says. Errors: BadTensor."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from meshd.errors import BadTensor

LARGEST: Final = 1e8
"""No residual is larger. The largest activations of published models are some 1e5; what is beyond this is on its way to
infinity, or bytes of something else."""


def tensor_bytes(rows: torch.Tensor) -> bytes:
    """The elements of ``rows``, row-major, in their own dtype (without numpy, which torch does not need to have)."""
    flat = rows.detach().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def ids_untrusted(body: bytes, n: int, vocab_size: int) -> torch.Tensor:
    """``n`` int32 token ids as int64."""
    if len(body) != 4 * n:
        raise BadTensor(f"{n} token ids take {4 * n} bytes, not {len(body)}")
    if n == 0:
        return torch.empty(0, dtype=torch.int64)
    ids = torch.frombuffer(bytearray(body), dtype=torch.int32).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise BadTensor(f"a token id outside 0..{vocab_size}")
    return ids


def residual_untrusted(body: bytes, n: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """``[n, hidden_size]`` rows, finite and of a sane size."""
    wanted = n * hidden_size * dtype.itemsize
    if len(body) != wanted:
        raise BadTensor(f"{n} rows of {hidden_size} {dtype} take {wanted} bytes, not {len(body)}")
    if n == 0:
        return torch.empty(0, hidden_size, dtype=dtype)
    rows = torch.frombuffer(bytearray(body), dtype=dtype).view(n, hidden_size)
    if not float(rows.abs().amax()) <= LARGEST:  # not for NaN either
        raise BadTensor("rows that are not finite, or far too large")
    return rows
