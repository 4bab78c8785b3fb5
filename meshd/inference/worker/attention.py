"""Attention over packed steps: the rows of many sessions in one ``[1, sum T]`` batch, each against its own KV.

A step is laid out once (`Layout`) and used by all layers. Two arithmetics, chosen by position alone, so that neither chunk size
nor company changes a bit of a result:

* positions below ``prompt_len``: blocks of 32 on the absolute grid (missing rows are zero), one masked call per block;
* positions from ``prompt_len`` on: one batch item per row, masked.

KV lengths are rounded up to 64, starts of sliding windows down to 64. Measured on CPU in bf16: with a mask and such lengths
`scaled_dot_product_attention` gives a row the same bits whatever stands beside it; without a mask, or with odd lengths, it does
not, and block sizes of 8 do not hold either. Soft caps and sinks take plain matrix products of fixed shapes instead.
Masks are added to the scores (0 or -inf): of a boolean one the operator would make such a one in every layer.
Heads that share a key stand as that key's queries, which reads the keys once for all of them: a block at position 4,000 of
SmolLM2 takes 0.85 of the time, with the same bits as long as the operator takes 32 queries at a time (measured: below 192).

transformers builds no masks for an attention function it has no mask function for; this module makes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
GATHERED_TOKENS: Final = 512
_MOST_QUERIES: Final = 191


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
    mask: torch.Tensor  # [BLOCK, keys], repeated for each head that shares the keys where those stand together


@dataclass(frozen=True, slots=True)
class RowCall:
    """Query rows, each its own batch item, against keys ``keys``."""

    state: PackedState
    rows: slice
    keys: slice
    mask: torch.Tensor  # [rows, 1, 1, keys]


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One row each of several sessions, with keys of the same length: their keys are gathered and computed in one call."""

    states: tuple[PackedState, ...]
    rows: torch.Tensor  # where in the batch
    keys: slice
    mask: torch.Tensor  # [sessions, 1, 1, keys]


Call = BlockCall | RowCall | GroupCall


class Layout:
    """Where every row of one step goes. Masks are made once per window size and shared by the layers.

    ``idle`` rows at the end belong to nobody: they keep a lone row company and attend to nothing.
    """

    def __init__(self, segments: Sequence[Segment], idle: int = 0) -> None:
        self.segments = segments
        self.idle = idle
        self._calls: dict[tuple[int | None, torch.dtype, int], list[Call]] = {}

    def positions(self) -> torch.Tensor:
        """``[1, sum T]`` absolute positions."""
        rows = [torch.arange(s.start, s.end) for s in self.segments]
        return torch.cat([*rows, torch.zeros(self.idle, dtype=torch.long)])[None]

    def calls(self, window: int | None, dtype: torch.dtype, each: int) -> list[Call]:
        """The attention calls of a layer that sees ``window`` positions back (None: all), computes in ``dtype`` and has ``each``
        heads that share a key."""
        found = self._calls.get((window, dtype, each))
        if found is None:
            together = each if each * BLOCK <= _MOST_QUERIES else 1
            calls = (call for s in self.segments for call in _calls(s, window, dtype, together))
            found = self._calls[window, dtype, each] = list(_grouped(calls))
        return found


def _grouped(calls: Iterable[BlockCall | RowCall]) -> Iterator[Call]:
    """Join single rows of several sessions. Gathering copies keys, so long ones stay on their own.

    An arena in which all sessions have slots of one capacity needs no copy, but reads every slot up to the longest and holds
    free slots, which small devices have no room for. Measured on SmolLM2's 30 layers, 16 sessions, one thread: 30 ms a step
    instead of 42 where all have 300 positions, 31.5 instead of 30.8 where they have 50 to 350.
    """
    alike: dict[tuple[int, int], list[RowCall]] = {}
    for call in calls:
        length = call.keys.stop - call.keys.start
        if isinstance(call, RowCall) and call.rows.stop - call.rows.start == 1 and length <= GATHERED_TOKENS:
            alike.setdefault((call.keys.start, call.keys.stop), []).append(call)
        else:
            yield call
    for group in alike.values():
        if len(group) == 1:
            yield group[0]
        else:
            where = torch.tensor([call.rows.start for call in group])
            mask = torch.cat([call.mask for call in group])
            yield GroupCall(tuple(call.state for call in group), where, group[0].keys, mask)


def _calls(segment: Segment, window: int | None, dtype: torch.dtype, together: int) -> Iterator[BlockCall | RowCall]:
    cut = min(max(segment.prompt_len, segment.start), segment.end)
    shift = segment.offset - segment.start
    for block in range(segment.start // BLOCK, -(-cut // BLOCK)):
        low, high = max(segment.start, block * BLOCK), min(cut, (block + 1) * BLOCK)
        if low >= high:
            continue
        grid = torch.arange(block * BLOCK, (block + 1) * BLOCK)
        keys = slice(_first_key(block * BLOCK, window), _round_up((block + 1) * BLOCK))
        mask = _mask(grid, keys, window, dtype).repeat(together, 1)
        yield BlockCall(segment.state, slice(low + shift, high + shift), low - block * BLOCK, keys, mask)
    low = cut
    while low < segment.end:
        # rows share a call only while their keys start at the same place and end at the same place
        high = min(segment.end, _round_up(low + 1))
        first = _first_key(low, window)
        if window is not None:
            high = min(high, first + GRAIN_TOKENS + window - 1)
        keys = slice(first, _round_up(low + 1))
        mask = _mask(torch.arange(low, high), keys, window, dtype)[:, None, None]
        yield RowCall(segment.state, slice(low + shift, high + shift), keys, mask)
        low = high


def _round_up(tokens: int) -> int:
    return -(-tokens // GRAIN_TOKENS) * GRAIN_TOKENS


def _first_key(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1) // GRAIN_TOKENS * GRAIN_TOKENS


def _mask(queries: torch.Tensor, keys: slice, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    key = torch.arange(keys.start, keys.stop)[None]
    seen = key <= queries[:, None]
    if window is not None:
        seen &= key > queries[:, None] - window
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


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
    """What a layer asks of its attention."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    window: int | None = None

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
    recipe = Recipe(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, sliding_window)
    out = query.new_empty(rows.shape[0], query.shape[1], value.shape[-1])
    serve(_current[-1], module.layer_idx, rows, out, recipe)
    return out[None], None


def serve(layout: Layout, layer: int, rows: torch.Tensor, out: torch.Tensor, recipe: Recipe) -> None:
    """Fill ``out`` ``[T, heads, value_dim]`` for the queries ``rows`` ``[T, heads, head_dim]`` of the layout's ``layer``."""
    if layout.idle:
        out[-layout.idle :] = 0
    groups = layout.segments[0].state.layer(layer).shape[1]
    for call in layout.calls(recipe.window, rows.dtype, rows.shape[1] // groups):
        if isinstance(call, GroupCall):
            out[call.rows] = _group(call, layer, rows[call.rows], recipe)
            continue
        part = rows[call.rows]
        if isinstance(call, BlockCall):
            out[call.rows] = answer_block(call, layer, part, recipe)
        else:
            out[call.rows] = _rows(call, layer, part, recipe)


def _group(call: GroupCall, layer: int, part: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    held = [state.layer(layer)[:, :, call.keys] for state in call.states]
    if recipe.written_out:
        each = [
            _explicit(part[i : i + 1], keys, values, call.mask[i, 0], recipe) for i, (keys, values) in enumerate(held)
        ]
        return torch.cat(each)
    keys, values = torch.stack(held, 1)
    return _row_items(part, keys, values, call.mask, recipe.scale)


def attend(
    state: PackedState,
    start: int,
    query: torch.Tensor,
    *,
    prompt_len: int,
    scale: float,
    beside: PackedState | None = None,
) -> torch.Tensor:
    """Attention of the first layer alone: ``query`` ``[n, heads, head_dim]`` from position ``start`` on, keys in place.

    ``beside`` is another session that asks the same in the same step.
    """
    n = len(query)
    segments = [Segment(state, start, n, prompt_len, 0)]
    if beside is not None:
        segments.append(Segment(beside, start, n, prompt_len, n))
        query = torch.cat([query, query])
    out = torch.empty_like(query)
    serve(Layout(segments), 0, query, out, Recipe(scale))
    return out[:n]


def answer_block(call: BlockCall, layer: int, part: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """What the queries ``part`` ``[rows, heads, head_dim]`` of one block see in the session's ``layer``-th layer."""
    n = len(part)
    keys, values = call.state.layer(layer)[:, :, call.keys]
    if n < BLOCK:
        whole = part.new_zeros(BLOCK, *part.shape[1:])
        whole[call.inside : call.inside + n] = part
        part = whole
    if recipe.written_out:
        result = _explicit(part, keys, values, call.mask[:BLOCK], recipe)
    else:
        heads = part.transpose(0, 1)
        together = len(call.mask) > BLOCK
        result = functional.scaled_dot_product_attention(
            heads.reshape(1, len(keys), -1, heads.shape[-1]) if together else heads[None],
            keys[None],
            values[None],
            attn_mask=call.mask,
            scale=recipe.scale,
            enable_gqa=not together,
        ).reshape(len(heads), BLOCK, -1)
        result = result.transpose(0, 1)
    return result[call.inside : call.inside + n]


def _rows(call: RowCall, layer: int, part: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    n = len(part)
    keys, values = call.state.layer(layer)[:, :, call.keys]
    if recipe.written_out:
        # one by one: a matrix product's bits may depend on how many rows it has
        each = [_explicit(part[i : i + 1], keys, values, call.mask[i, 0], recipe) for i in range(n)]
        return each[0] if n == 1 else torch.cat(each)
    return _row_items(part, keys.expand(n, -1, -1, -1), values.expand(n, -1, -1, -1), call.mask, recipe.scale)


def _row_items(
    part: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Every row its own batch item; the heads that share a key stand as that key's queries."""
    n, heads, width = part.shape
    query = part.reshape(n, keys.shape[1], heads // keys.shape[1], width)
    result = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    return result.reshape(n, heads, -1)


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
    scores = scores.masked_fill(mask < 0, torch.finfo(scores.dtype).min)
    if recipe.sinks is not None:
        scores = torch.cat([scores, recipe.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, n, 1)], -1)
        scores = scores - scores.amax(-1, keepdim=True)  # which rounds: GPT-OSS does it, so that nothing overflows
    weights = scores.softmax(-1, dtype=torch.float32).to(part.dtype)[..., : keys.shape[1]]
    result = torch.bmm(weights.reshape(groups, heads // groups * n, -1), values)
    return result.view(heads, n, -1).transpose(0, 1)


AttentionInterface.register(NAME, packed_attention)
