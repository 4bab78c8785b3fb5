"""Attention over packed steps: the rows of many sessions in one ``[1, sum T]`` batch, each against its own KV.

A step is laid out once (`Layout`) and used by all layers. Two arithmetics, chosen by position alone, so that neither chunk size
nor company changes a bit of a result:

* positions below ``prompt_len``: blocks of 32 on the absolute grid (missing rows are zero), one masked call per block;
* positions from ``prompt_len`` on: one batch item per row, masked.

KV lengths are rounded up to 64, starts of sliding windows down to 64. Measured on CPU in bf16: with a mask and such lengths
`scaled_dot_product_attention` gives a row the same bits whatever stands beside it; without a mask, or with odd lengths, it does
not, and block sizes of 8 do not hold either. Soft caps and sinks take plain matrix products of fixed shapes instead.

transformers builds no masks for an attention function it has no mask function for; this module makes its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from meshd.inference.worker.kv import GRAIN_TOKENS, PackedState

NAME: Final = "meshd_packed"
BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's rows of a packed step: positions ``[start, start + n)`` at ``[offset, offset + n)`` of the batch."""

    state: PackedState
    start: int
    n: int
    prompt_len: int
    offset: int

    @property
    def end(self) -> int:
        return self.start + self.n


@dataclass(frozen=True, slots=True)
class BlockCall:
    """Query rows ``rows`` of the batch, standing at ``[inside, inside + len(rows))`` of a block, against keys ``keys``."""

    state: PackedState
    rows: slice
    inside: int
    keys: slice
    mask: torch.Tensor  # [BLOCK, keys]


@dataclass(frozen=True, slots=True)
class RowCall:
    """Query rows, each its own batch item, against keys ``keys``."""

    state: PackedState
    rows: slice
    keys: slice
    mask: torch.Tensor  # [rows, 1, 1, keys]


class Layout:
    """Where every row of one step goes. Masks are made once per window size and shared by the layers."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._calls: dict[int | None, list[BlockCall | RowCall]] = {}

    def positions(self) -> torch.Tensor:
        """``[1, sum T]`` absolute positions."""
        return torch.cat([torch.arange(s.start, s.end) for s in self.segments])[None]

    def calls(self, window: int | None) -> list[BlockCall | RowCall]:
        """The attention calls of a layer that sees ``window`` positions back (None: all)."""
        found = self._calls.get(window)
        if found is None:
            found = self._calls[window] = [call for s in self.segments for call in _calls(s, window)]
        return found


def _calls(segment: Segment, window: int | None) -> Iterator[BlockCall | RowCall]:
    cut = min(max(segment.prompt_len, segment.start), segment.end)
    shift = segment.offset - segment.start
    for block in range(segment.start // BLOCK, -(-cut // BLOCK)):
        low, high = max(segment.start, block * BLOCK), min(cut, (block + 1) * BLOCK)
        if low >= high:
            continue
        grid = torch.arange(block * BLOCK, (block + 1) * BLOCK)
        keys = slice(_first_key(block * BLOCK, window), _round_up((block + 1) * BLOCK))
        yield BlockCall(
            segment.state, slice(low + shift, high + shift), low - block * BLOCK, keys, _mask(grid, keys, window)
        )
    low = cut
    while low < segment.end:
        # rows share a call only while their keys start at the same place and end at the same place
        high = min(segment.end, _round_up(low + 1))
        first = _first_key(low, window)
        if window is not None:
            high = min(high, first + GRAIN_TOKENS + window - 1)
        keys = slice(first, _round_up(low + 1))
        mask = _mask(torch.arange(low, high), keys, window)[:, None, None]
        yield RowCall(segment.state, slice(low + shift, high + shift), keys, mask)
        low = high


def _round_up(tokens: int) -> int:
    return -(-tokens // GRAIN_TOKENS) * GRAIN_TOKENS


def _first_key(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1) // GRAIN_TOKENS * GRAIN_TOKENS


def _mask(queries: torch.Tensor, keys: slice, window: int | None) -> torch.Tensor:
    key = torch.arange(keys.start, keys.stop)[None]
    mask = key <= queries[:, None]
    return mask if window is None else mask & (key > queries[:, None] - window)


class PackedCache(Cache):
    """What the modules take for their cache: it hands each session's new keys and values to that session."""

    is_compileable = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.layers: list[Any] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for s in self.layout.segments:
            rows = slice(s.offset, s.offset + s.n)
            s.state.put(layer_idx, s.start, keys[0, :, rows], values[0, :, rows])
        return keys, values

    def get_seq_length(self, *_args: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_args: Any) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, *_args: Any) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a layer asks of its attention beside the mask."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def written_out(self) -> bool:
        """True for what the fused kernel cannot do."""
        return self.softcap is not None or self.sinks is not None


_current: list[Layout] = []  # the modules pass no layout through; a worker computes one step at a time


@contextmanager
def laid_out(layout: Layout) -> Iterator[PackedCache]:
    """Within this context the attention function serves ``layout``."""
    _current.append(layout)
    try:
        yield PackedCache(layout)
    finally:
        _current.pop()


def packed_attention(  # noqa: PLR0917 - the signature of transformers' interface
    module: Any,
    query: torch.Tensor,
    _key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface: ``query`` is ``[1, heads, sum T, head_dim]``."""
    rows = query[0].transpose(0, 1)  # [T, heads, head_dim]
    recipe = Recipe(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    out = query.new_empty(rows.shape[0], query.shape[1], value.shape[-1])
    for call in _current[-1].calls(sliding_window):
        keys, values = call.state.layer(module.layer_idx)
        part, keys, values = rows[call.rows], keys[:, call.keys], values[:, call.keys]
        if isinstance(call, BlockCall):
            out[call.rows] = _block(call, part, keys, values, recipe)
        else:
            out[call.rows] = _rows(call, part, keys, values, recipe)
    return out[None], None


def attend(state: PackedState, start: int, query: torch.Tensor, prompt_len: int, scale: float) -> torch.Tensor:
    """Attention of the first layer alone: ``query`` ``[n, heads, head_dim]`` from position ``start`` on, keys in place."""
    with laid_out(Layout([Segment(state, start, len(query), prompt_len, 0)])):
        keys, values = state.layer(0)
        result, _ = packed_attention(
            _FirstLayer, query.transpose(0, 1)[None], keys[None], values[None], None, scaling=scale
        )
    return result[0]


class _FirstLayer:
    layer_idx = 0


def _block(
    call: BlockCall, part: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    n = len(part)
    if n < BLOCK:
        whole = part.new_zeros(BLOCK, *part.shape[1:])
        whole[call.inside : call.inside + n] = part
        part = whole
    if recipe.written_out:
        result = _explicit(part, keys, values, call.mask, recipe)
    else:
        result = functional.scaled_dot_product_attention(
            part.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=call.mask,
            scale=recipe.scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return result[call.inside : call.inside + n]


def _rows(call: RowCall, part: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    n, heads, width = part.shape
    if recipe.written_out:
        # one by one: a matrix product's bits may depend on how many rows it has
        each = [_explicit(part[i : i + 1], keys, values, call.mask[i, 0], recipe) for i in range(n)]
        return each[0] if n == 1 else torch.cat(each)
    groups = keys.shape[0]
    return functional.scaled_dot_product_attention(
        part.reshape(n, groups, heads // groups, width),
        keys.expand(n, -1, -1, -1),
        values.expand(n, -1, -1, -1),
        attn_mask=call.mask,
        scale=recipe.scale,
    ).reshape(n, heads, -1)


def _explicit(
    part: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Attention written out, for what the fused kernel lacks: a cap on the scores, and sinks that take weight from all keys."""
    n, heads, width = part.shape
    groups = keys.shape[0]
    query = part.transpose(0, 1).reshape(groups, heads // groups * n, width)
    scores = (torch.bmm(query, keys.transpose(1, 2)) * recipe.scale).view(heads, n, -1)
    if recipe.softcap is not None:
        scores = torch.tanh(scores / recipe.softcap) * recipe.softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if recipe.sinks is not None:
        scores = torch.cat([scores, recipe.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, n, 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(part.dtype)[..., : keys.shape[1]]
    result = torch.bmm(weights.reshape(groups, heads // groups * n, -1), values)
    return result.view(heads, n, -1).transpose(0, 1)


AttentionInterface.register(NAME, packed_attention)
