"""Running a cut model's own ``forward`` over a sub-range of its layers, with residuals going in and coming out.

The model's forward is used as it is, because masks, rotary positions, scalings and caps live there. Where a residual enters,
a hook replaces whatever the model computed before that layer (its embedding, scalings, norms); where one leaves, a hook keeps
the last layer's output. One pass at a time: the focus on a sub-range is state of the modules.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from meshd.inference.worker.longrope import TwoRanges, begins_anew
from meshd.inference.worker.skeleton import Skeleton, cut_config, numbered
from meshd.vocabulary import LayerRange


class _Reached(Exception):
    """The wanted layer's input is there; nothing after it is needed."""


class Passes:
    """A skeleton that can be run. Rows are ``[n, hidden]`` residuals or ``[n]`` token ids."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self._numbered = [numbered(layer) for layer in skeleton.layers]
        self._cache_name = (
            "cache" if "cache" in inspect.signature(skeleton.decoder.forward).parameters else "past_key_values"
        )
        self._lists: dict[LayerRange, nn.ModuleList] = {}
        self._focus: LayerRange | None = None
        self._enter: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None
        self._stop_at_entry = False
        self._leave: torch.Tensor | None = None
        self._left: torch.Tensor | None = None
        self._ranges = TwoRanges.of(skeleton)
        for layer in skeleton.layers:
            layer.register_forward_pre_hook(self._before, with_kwargs=True)
            layer.register_forward_hook(self._after)

    @property
    def begins_anew_at(self) -> int | None:
        """The length beyond which a session that began shorter is computed again from its beginning; None for most models."""
        return self._ranges.limit if self._ranges is not None and begins_anew(self.skeleton.model) else None

    def count_as(self, length: int) -> None:
        """From now on every row belongs to a text of at least this length (see `longrope`): its prompt's."""
        if self._ranges is not None:
            self._ranges.reached = length

    def residual(self, layers: LayerRange, rows: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """``rows`` through ``layers``: the residual after them, before any final norm."""
        self.focus(layers)
        self._call(self.skeleton.decoder, layers, rows, positions, cache)
        return self._take()

    def logits(
        self, layers: LayerRange, rows: torch.Tensor, positions: torch.Tensor, cache: Any, keep: torch.Tensor
    ) -> torch.Tensor:
        """``rows`` through ``layers`` and the head: logits ``[len(keep), vocabulary]`` of the rows ``keep``."""
        self.focus(layers)
        out = self._call(self.skeleton.model, layers, rows, positions, cache, logits_to_keep=keep)
        self._take()
        return out.logits[0]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """What enters layer 0 for ``ids``."""
        first = LayerRange(self.skeleton.held.start, self.skeleton.held.start + 1)
        self.focus(first)
        self._stop_at_entry = True
        try:
            self._call(self.skeleton.decoder, first, ids, torch.arange(len(ids))[None], None)
        except _Reached:
            pass
        finally:
            self._stop_at_entry = False
        entered, self._entered = self._entered, None
        if entered is None:
            raise RuntimeError("the first layer was never reached")
        return entered

    def head(self, rows: torch.Tensor, keep: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits of residual ``rows``: the last layer runs, and its output is replaced by them, so positions do not matter."""
        last = LayerRange(self.skeleton.held.end - 1, self.skeleton.held.end)
        self._leave = rows
        try:
            return self.logits(last, rows, torch.zeros(1, len(rows), dtype=torch.long), cache, keep)
        finally:
            self._leave = None

    def focus(self, layers: LayerRange) -> None:
        """Make the model consist of ``layers`` (whole-model numbers), numbered from 0."""
        if layers == self._focus:
            return
        start = self.skeleton.held.start
        local = LayerRange(layers.start - start, layers.end - start)
        if layers not in self._lists:
            self._lists[layers] = nn.ModuleList(self.skeleton.layers[local.start : local.end])
        setattr(self.skeleton.decoder, self.skeleton.layers_name, self._lists[layers])
        cut_config(self.skeleton, local)
        for number, modules in enumerate(self._numbered[local.start : local.end]):
            for module, attribute in modules:
                setattr(module, attribute, number)
        self._focus = layers

    def _call(
        self, target: Any, layers: LayerRange, rows: torch.Tensor, positions: torch.Tensor, cache: Any, **more: Any
    ) -> Any:
        held = self._lists[layers]
        self._first, self._last = held[0], held[-1]
        self._left = None
        inputs: dict[str, Any] = {"position_ids": positions, "use_cache": cache is not None, **more}
        if cache is not None:
            inputs[self._cache_name] = cache
        if rows.is_floating_point():
            self._enter = rows[None]
        if not rows.is_floating_point():
            inputs["input_ids"] = rows[None]
        elif self.skeleton.first:  # embeddings may have another width than residuals; what becomes of these is replaced
            inputs["input_ids"] = positions.new_zeros(1, len(rows))
        else:
            inputs["inputs_embeds"] = rows[None]
        try:
            return target(**inputs)
        finally:
            self._enter = None

    def _take(self) -> torch.Tensor:
        left, self._left = self._left, None
        if left is None:
            raise RuntimeError("the last layer was never reached")
        return left[0]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is not self._first:
            return None
        if self._stop_at_entry:
            self._entered = (args[0] if args else kwargs["hidden_states"])[0]
            raise _Reached
        if self._enter is None:
            return None
        if args:
            return (self._enter, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._enter}

    def _after(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if module is not self._last:
            return None
        several = isinstance(output, tuple)
        if self._leave is not None:
            replaced = self._leave[None]
            self._left = replaced
            return (replaced, *output[1:]) if several else replaced
        self._left = output[0] if several else output
        return None
