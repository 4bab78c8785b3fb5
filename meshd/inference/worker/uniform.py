"""One packed step through layers of one shape, prepared once for all of them.

What differs between layers is only which part of a session's buffer they use. So the places where new keys and values go, and
the keys that each query meets, are cut out for all layers at the step's start: a layer then finds its own by number. Cutting
them in every layer took a third of a decode step's time (measured, one session). The arithmetic is `attention`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from meshd.inference.worker.attention import BlockCall, Call, GroupCall, Layout, Recipe, RowCall, answer_block

Attend = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layers have in common."""

    heads: int
    groups: int
    width: int

    @property
    def each(self) -> int:
        """Heads that share keys."""
        return self.heads // self.groups


class UniformStep:
    """The rows of ``layout`` on their way through the layers.

    What `_prepare` makes must not refer to this object: a circle would keep the step's sessions until the collector comes by,
    hundreds of megabytes in a crowd (measured).
    """

    def __init__(self, layout: Layout, shape: Shape, dtype: torch.dtype) -> None:
        self._layout = layout
        self._shape = shape
        segments = layout.segments
        self._sizes: Final = [s.n for s in segments] + ([layout.idle] if layout.idle else [])
        self._mixed = torch.zeros(sum(self._sizes), shape.heads, shape.width, dtype=dtype)  # idle rows stay zero
        self._flat = self._mixed.view(len(self._mixed), -1)
        self._attends: dict[int | None, list[Attend]] = {}
        places = []
        for s in segments:
            whole = s.state.room(s.end, shape.groups, shape.width, dtype)
            places.append(whole[:, :, :, s.start : s.end].permute(0, 3, 1, 2, 4).unbind(0))
        self._places: Final = list(zip(*places, strict=True))

    def mix(self, layer: int, turned: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """Keep the keys and values of ``turned`` ``[T, heads + 2 * groups, width]``; what its queries see, ``[T, heads *
        width]``. The result is overwritten by the next call."""
        shape = self._shape
        rows = turned.shape[0]
        queries = turned.narrow(1, 0, shape.heads)
        both = turned.narrow(1, shape.heads, 2 * shape.groups).view(rows, 2, shape.groups, shape.width)
        parts = both.split(self._sizes) if len(self._sizes) > 1 else (both,)
        for place, part in zip(self._places[layer], parts, strict=False):  # idle rows have no place
            place.copy_(part)
        attends = self._attends.get(recipe.window)
        if attends is None:
            attends = self._attends[recipe.window] = self._prepare(recipe)
        for attend in attends:
            attend(layer, queries)
        return self._flat

    def _prepare(self, recipe: Recipe) -> list[Attend]:
        return [
            self._attend(call, recipe)
            for call in self._layout.calls(recipe.window, self._mixed.dtype, self._shape.each)
        ]

    def _attend(self, call: Call, recipe: Recipe) -> Attend:
        match call:
            case RowCall():
                return self._rows(call, recipe.scale)
            case GroupCall():
                return self._group(call, recipe.scale)
            case BlockCall():
                return self._block(call, recipe)

    def _rows(self, call: RowCall, scale: float) -> Attend:
        shape, rows = self._shape, call.rows
        n = rows.stop - rows.start
        target = self._mixed[rows].view(n, shape.groups, shape.each, shape.width)
        held = call.state.room(call.keys.start, shape.groups, shape.width, self._mixed.dtype)[:, :, None, :, call.keys]
        keys, values = (part.expand(-1, n, -1, -1, -1).unbind(0) for part in held.unbind(1))

        def attend(layer: int, queries: torch.Tensor) -> None:
            asked = queries[rows].view(n, shape.groups, shape.each, shape.width)
            seen = functional.scaled_dot_product_attention(
                asked, keys[layer], values[layer], attn_mask=call.mask, scale=scale
            )
            target.copy_(seen)

        return attend

    def _group(self, call: GroupCall, scale: float) -> Attend:
        shape, n = self._shape, len(call.states)
        held = [
            state.room(call.keys.start, shape.groups, shape.width, self._mixed.dtype)[:, :, :, call.keys].unbind(0)
            for state in call.states
        ]
        by_layer = list(zip(*held, strict=True))

        rows, mixed = _as_slice(call.rows), self._mixed

        def attend(layer: int, queries: torch.Tensor) -> None:
            asked = queries[rows].view(n, shape.groups, shape.each, shape.width)
            keys, values = torch.stack(by_layer[layer], 1).unbind(0)
            seen = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=call.mask, scale=scale)
            mixed[rows] = seen.reshape(n, shape.heads, shape.width)

        return attend

    def _block(self, call: BlockCall, recipe: Recipe) -> Attend:
        mixed = self._mixed

        def attend(layer: int, queries: torch.Tensor) -> None:
            mixed[call.rows] = answer_block(call, layer, queries[call.rows], recipe)

        return attend


def _as_slice(rows: torch.Tensor) -> torch.Tensor | slice:
    """Rows that stand side by side need not be picked one by one."""
    first, n = int(rows[0]), len(rows)
    return slice(first, first + n) if torch.equal(rows, torch.arange(first, first + n)) else rows
