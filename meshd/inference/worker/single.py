"""The fallback for architectures that cannot be packed: one session per forward, with transformers' own cache.

Latent attention, ALiBi, convolutions and linear attention keep states that are not plain keys and values. Such a state is exact
going forward; where it cannot be cut back to a position it is forgotten, and the session is replayed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from meshd.inference.worker.kv import SessionState
from meshd.vocabulary import LayerRange


class StageCache(DynamicCache):
    """A cache whose length is the session's, so that a stage without any attention layer has one too."""

    seen = 0

    def get_seq_length(self, *_args: Any) -> int:
        return self.seen

    def get_query_offset(self, *_args: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, DynamicLayer):
            return layer.get_mask_sizes(query_length)
        return self.seen + query_length, 0

    def cut(self, length: int) -> bool:
        """Forget positions from ``length`` on; False if some layer cannot."""
        if not all(type(layer) is DynamicLayer for layer in self.layers):
            return False
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys = layer.keys[..., :length, :]
                layer.values = layer.values[..., :length, :]
        self.seen = length
        return True

    @classmethod
    def of(cls, config: Any, *, typed: bool) -> StageCache:
        """A cache for the layers of ``config``; ``typed`` False gives every layer all positions, whatever the config says."""
        return cls(config=config) if typed else cls()

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor that any layer keeps."""
        return sum(_tensor_bytes(vars(layer)) for layer in self.layers)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0


class SingleState(SessionState):
    """A session with a `StageCache`; made for the sub-range that the model is focused on when it first runs. ``counts_as`` is
    the length that its text has come to, where that changes all of it."""

    __slots__ = ("cache", "counts_as")

    def __init__(self, layers: LayerRange, *, logs: bool, token_bytes: int = 0) -> None:
        super().__init__(layers, logs=logs, token_bytes=token_bytes)
        self.cache: StageCache | None = None
        self.counts_as = 0

    def truncate(self, n: int) -> None:
        if n >= self.have:
            return
        if self.cache is not None and n > 0 and self.cache.cut(n):
            self.have = n
        else:
            self.forget()

    def forget(self) -> None:
        """Back to an empty session."""
        self.cache = None
        self.have = 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + (self.cache.nbytes if self.cache is not None else 0)
