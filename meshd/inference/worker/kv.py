"""What a stage keeps of one session: keys and values, and the boundary log, as one object.

The boundary log holds the rows this stage sent downstream, so that a replacement of the next stage can be fed without asking
further up. It and the KV are cut together, evicted together and count against one budget. A state belongs to one sub-range of
the loaded layers; another sub-range needs another state.

Invariants: rows ``[0, have)`` are valid, whatever lies behind is junk that nobody reads unmasked; buffers are zero-initialised
(masked junk must be finite: zero times NaN is NaN) and their capacity is a multiple of 64, because attention reads whole
blocks of 64. Lengths in tokens, sizes in bytes.
"""

from __future__ import annotations

from typing import Final

import torch

from meshd.errors import NeedRows
from meshd.vocabulary import LayerRange

GRAIN_TOKENS: Final = 64
STRIDE_TOKENS: Final = 256


def capacity_for(tokens: int) -> int:
    """Buffer length for ``tokens``: multiples of 64 while small, of 256 afterwards (growing copies, so not too finely)."""
    grain = GRAIN_TOKENS if tokens <= STRIDE_TOKENS else STRIDE_TOKENS
    return max(1, -(-tokens // grain)) * grain


def grown(old: torch.Tensor | None, like: torch.Tensor, axis: int, capacity: int) -> torch.Tensor:
    """A zeroed buffer of ``capacity`` along ``axis`` with what ``old`` holds copied in."""
    shape = list(like.shape)
    shape[axis] = capacity
    new = like.new_zeros(shape)
    if old is not None:
        new.narrow(axis, 0, old.shape[axis]).copy_(old)
    return new


def _copy(old: torch.Tensor, axis: int, tokens: int, capacity: int) -> torch.Tensor:
    """A buffer of ``capacity`` along ``axis`` with the first ``tokens`` of ``old``."""
    new = grown(None, old, axis, capacity)
    new.narrow(axis, 0, tokens).copy_(old.narrow(axis, 0, tokens))
    return new


class SessionState:
    """One session on one sub-range. ``have`` positions are computed; ``layers`` is the sub-range."""

    __slots__ = ("_log", "_wanted", "have", "layers", "logs", "token_bytes")

    def __init__(self, layers: LayerRange, *, logs: bool, token_bytes: int = 0) -> None:
        self.layers = layers
        self.token_bytes = token_bytes
        self.logs = logs  # False where the range ends the model: nothing goes downstream
        self.have = 0
        self._wanted = 0
        self._log: torch.Tensor | None = None

    def truncate(self, n: int) -> None:
        """Forget positions from ``n`` on. A state that cannot be cut there forgets more: look at ``have`` afterwards."""
        self.have = min(self.have, n)

    def reserve(self, tokens: int) -> None:
        """The next buffers made or grown will hold at least ``tokens``."""
        self._wanted = max(self._wanted, tokens)

    def bytes_for(self, tokens: int) -> int:
        """What this state will hold once it is ``tokens`` long."""
        return capacity_for(max(tokens, self._wanted)) * self.token_bytes

    def copy_from(self, source: SessionState, tokens: int) -> None:
        """Become the first ``tokens`` positions of ``source``, which has them; this one is empty."""
        if source._log is not None:
            self._log = _copy(source._log, 0, tokens, self._capacity(tokens))
        self.have = tokens

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return 0 if self._log is None else self._log.nbytes

    def boundary(self, start: int, end: int) -> torch.Tensor:
        """The rows ``[start, end)`` sent downstream. Raises NeedRows(have) when they are not (all) there."""
        if self._log is None or not 0 <= start <= end <= self.have:
            raise NeedRows(self.have if self.logs else 0)
        return self._log[start:end]

    def log(self, start: int, rows: torch.Tensor) -> None:
        """Keep ``rows`` as positions ``start`` onwards of the boundary log."""
        if not self.logs:
            return
        end = start + len(rows)
        if self._log is None or len(self._log) < end:
            self._log = grown(self._log, rows, 0, self._capacity(end))
        self._log[start:end] = rows

    def _capacity(self, end: int) -> int:
        return capacity_for(max(end, self._wanted))


class PackedState(SessionState):
    """KV as one ``[2, heads, capacity, head_dim]`` buffer per layer; sliding layers keep all of it, so that any cut is exact.

    Where all layers are of one shape and run together, the buffers are parts of one, ``whole``.
    """

    __slots__ = ("buffers", "whole")

    def __init__(self, layers: LayerRange, *, logs: bool, token_bytes: int = 0) -> None:
        super().__init__(layers, logs=logs, token_bytes=token_bytes)
        self.buffers: list[torch.Tensor | None] = [None] * len(layers)
        self.whole: torch.Tensor | None = None

    def put(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``[heads, n, head_dim]`` at position ``start`` of the sub-range's ``layer``-th layer."""
        end = start + keys.shape[1]
        held = self._room(layer, keys, end)
        held[0, :, start:end] = keys
        held[1, :, start:end] = values

    def room(self, end: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """One buffer for all layers, ``[layers, 2, heads, capacity, width]``, of at least ``end`` positions. For sessions
        whose layers are all of this shape and are never given their keys one by one."""
        old = self.whole
        if old is not None and old.shape[3] >= end:
            return old
        whole = torch.zeros(len(self.layers), 2, heads, self._capacity(end), width, dtype=dtype)
        if old is not None:
            whole[:, :, :, : old.shape[3]] = old
        self._adopt(whole)
        return whole

    def _adopt(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self.buffers = list(whole.unbind(0))

    def copy_from(self, source: SessionState, tokens: int) -> None:
        if not isinstance(source, PackedState):
            raise TypeError("states of one stage are of one kind")
        super().copy_from(source, tokens)
        capacity = self._capacity(tokens)
        if source.whole is not None:
            self._adopt(_copy(source.whole, 3, tokens, capacity))
        else:
            self.buffers = [held if held is None else _copy(held, 2, tokens, capacity) for held in source.buffers]

    def layer(self, layer: int) -> torch.Tensor:
        """The buffer of the sub-range's ``layer``-th layer: keys are ``[0]``, values ``[1]``."""
        held = self.buffers[layer]
        if held is None:
            raise LookupError(f"layer {layer} of {self.layers} has no keys yet")
        return held

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(buffer.nbytes for buffer in self.buffers if buffer is not None)

    def _room(self, layer: int, keys: torch.Tensor, end: int) -> torch.Tensor:
        held = self.buffers[layer]
        if held is None or held.shape[2] < end:
            held = self.buffers[layer] = grown(held, keys.expand(2, -1, -1, -1), 2, self._capacity(end))
        return held
