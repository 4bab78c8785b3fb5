"""The layers a worker holds, and what can be computed with them.

Knows tensors, sessions' states and steps; knows nothing of sockets, queues, sampling or budgets. One thread. A session runs one
sub-range of the held layers; its state belongs to that sub-range.

Where the arithmetic is deterministic (see `arithmetic`), a row's result depends on the session's tokens and ``prompt_len`` only:
not on chunks, company, or whether it is a replay. Errors: `ModelRefused` at construction, `NeedRows` and `RangeNotHeld` from
steps, before anything is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from meshd.errors import ModelRefused, NeedRows, RangeNotHeld
from meshd.inference.worker import arithmetic, fused, linears, packing
from meshd.inference.worker.attention import Layout, Segment, laid_out
from meshd.inference.worker.experts import use_experts
from meshd.inference.worker.item import Item
from meshd.inference.worker.kv import GRAIN_TOKENS, PackedState, SessionState
from meshd.inference.worker.passes import Passes
from meshd.inference.worker.single import SingleState, StageCache
from meshd.inference.worker.skeleton import build
from meshd.inference.worker.weights import touch
from meshd.vocabulary import LayerRange

__all__ = ["Item", "SessionState", "Stage"]

_MEASURED_ROWS: Final = 64


class Stage:
    """Layers ``layers`` of the model in ``folder``.

    ``dtype``: auto, bf16, fp16, fp32 or int8. ``prepack``: auto (if the copy fits ``budget_bytes`` of private weights), on, off.
    ``progress`` is called with 0..1 while loading.
    """

    def __init__(
        self,
        folder: Path,
        layers: LayerRange,
        *,
        dtype: str = "auto",
        threads: int = 1,
        deterministic: bool = True,
        prepack: str = "auto",
        budget_bytes: int | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        report = progress or (lambda _done: None)
        self.layers = layers
        self.warnings: list[str] = []
        self.blocks: list[str] = []  # how many rows each kind of linear takes at a time
        self._skeleton = skeleton = build(folder, layers, dtype)
        self.dtype = skeleton.dtype
        self.num_layers = skeleton.num_layers
        self.hidden_size = int(skeleton.config.hidden_size)
        self.vocab_size = int(skeleton.config.vocab_size)
        use_experts(skeleton.model)
        linears.straighten(skeleton.model)
        named = [(skeleton.where[name], parameter) for name, parameter in skeleton.model.named_parameters()]
        touch(named, lambda done: report(0.9 * done))
        self._passes = Passes(skeleton)
        self._token_bytes: dict[LayerRange, int] = {}
        self._typed_caches = True
        self._row_by_row = False
        self._fused: fused.FusedLayers | None = None
        self._computed_rows: Callable[[int], int] = lambda rows: rows  # idle ones included
        with torch.inference_mode():
            self.packs = self._decide_packing()
            self._passes.focus(layers)
            path = self._swap_linears(prepack, budget_bytes)
            self._spare_head()
            self.private_bytes = self._count_private()
            self.deterministic = deterministic and self._prove()
            self.arith = arithmetic.name(skeleton, path=path, packs=self.packs, deterministic=self.deterministic)
        report(1.0)

    def state(self, layers: LayerRange | None = None) -> SessionState:
        """An empty session for ``layers`` (all held ones by default)."""
        layers = layers or self.layers
        self._check(layers)
        kind = PackedState if self.packs else SingleState
        return kind(layers, logs=layers.end < self.num_layers, token_bytes=self._token_bytes_of(layers))

    @torch.inference_mode()
    def step(self, layers: LayerRange, items: Sequence[Item], *, logits: bool = True) -> list[torch.Tensor]:
        """Run all items as one batch. Per item: the last ``emit`` residual rows ``[emit, hidden]`` in the stage's dtype, or,
        where ``layers`` end the model and ``logits`` are wanted, float32 logits ``[emit, vocabulary]``.

        Each session is truncated at its item's start first. Raises NeedRows(have) if one is then shorter than that, and
        nothing is computed. A state must not occur twice in one step.
        """
        self._check(layers)
        for item in items:
            item.state.truncate(item.start)
            self._begin_anew(item)
        for item in items:
            if item.state.have < item.start:
                raise NeedRows(item.state.have)
        live = [item for item in items if item.n]
        head = logits and layers.end == self.num_layers
        made = dict(zip((id(item) for item in live), self._run(layers, live, head), strict=True)) if live else {}
        return [made[id(item)] if item.n else self._nothing(head) for item in items]

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[n]`` token ids -> what enters layer 0, ``[n, hidden]``. Raises RangeNotHeld without layer 0."""
        if self.layers.start:
            raise RangeNotHeld("the embedding is not held here", held=self.layers)
        return self._passes.embed(ids)

    @torch.inference_mode()
    def forward(self, layers: LayerRange, rows: torch.Tensor) -> torch.Tensor:
        """Without a session: positions 0..n in (ids, if ``layers`` start at 0 and ``rows`` are integers), residual out."""
        self._check(layers)
        n = len(rows)
        return self._run(layers, [Item(self.state(layers), 0, n, n, n, rows)], head=False)[0]

    @torch.inference_mode()
    def lm_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and head of residual rows: float32 ``[n, vocabulary]``. Raises RangeNotHeld without the last layer."""
        if self.layers.end != self.num_layers:
            raise RangeNotHeld("the head is not held here", held=self.layers)
        n = len(rows)
        if idle := self._computed_rows(n) - n:
            rows = torch.cat([rows, rows.new_zeros(idle, self.hidden_size)])
        if self._fused is not None:
            return self._fused.logits(rows)[:n].float()
        keep = torch.arange(len(rows))
        if not self.packs:
            return self._passes.head(rows, keep, None)[:n].float()
        last = LayerRange(self.num_layers - 1, self.num_layers)
        scratch = PackedState(last, logs=False)
        with laid_out(Layout([Segment(scratch, 0, len(rows), len(rows), 0)])) as cache:
            return self._passes.head(rows, keep, cache)[:n].float()

    def measure(self) -> tuple[float, float]:
        """Milliseconds per layer of one decode row and of a prefill chunk of 64 rows; the median of three. A model with fewer
        positions is measured with what it has."""
        one: list[float] = []
        many: list[float] = []
        chunk = max(1, self._skeleton.at_most(_MEASURED_ROWS + 1) - 1)
        rows = packing.sample_rows(self._skeleton, chunk + 1)
        for _ in range(3):
            state = self.state()
            for samples, start, end in ((many, 0, chunk), (one, chunk, chunk + 1)):
                began = time.perf_counter()
                self.step(self.layers, [Item(state, start, end - start, 1, chunk, rows[start:end])])
                samples.append((time.perf_counter() - began) * 1e3 / len(self.layers))
        return sorted(one)[1], sorted(many)[1] * _MEASURED_ROWS / chunk

    def _check(self, layers: LayerRange) -> None:
        if not self.layers.covers(layers):
            raise RangeNotHeld(f"layers {layers} are not held here", held=self.layers)

    def _nothing(self, head: bool) -> torch.Tensor:
        if head:
            return torch.empty(0, self.vocab_size)
        return torch.empty(0, self.hidden_size, dtype=self._skeleton.torch_dtype)

    def _run(self, layers: LayerRange, items: Sequence[Item], head: bool) -> list[torch.Tensor]:
        """The items' emitted rows. int8 weights have another product for the rows of prompts (see `linears`), so there those
        run by themselves, and an item that has rows of both kinds in two parts."""
        run = self._run_packed if self.packs else self._run_single
        if self.dtype != "int8":
            return run(layers, items, head)
        parts = [item.split() for item in items]
        prompts, answers = ([part for part in kind if part is not None] for kind in zip(*parts, strict=True))
        with linears.of_prompts():
            begun = iter(run(layers, prompts, head) if prompts else ())
        ended = iter(run(layers, answers, head) if answers else ())
        out = [
            [next(made) for part, made in zip(both, (begun, ended), strict=True) if part is not None] for both in parts
        ]
        return [torch.cat(rows) if len(rows) > 1 else rows[0] for rows in out]

    # --- packed -------------------------------------------------------------------------------------------------------

    def _lay_out(self, items: Sequence[Item]) -> tuple[Layout, torch.Tensor]:
        """The step's segments and its rows, with idle rows added where their number asks for it (see `arithmetic`)."""
        segments: list[Segment] = []
        offset = 0
        for item in items:
            if not isinstance(item.state, PackedState):
                raise TypeError("the state is not one of this stage")
            segments.append(Segment(item.state, item.start, item.n, item.prompt_len, offset))
            offset += item.n
        rows = items[0].rows if len(items) == 1 else torch.cat([item.rows for item in items])
        if idle := self._computed_rows(offset) - offset:
            rows = torch.cat([rows, rows.new_zeros(idle, *rows.shape[1:])])
        return Layout(segments, idle), rows

    def _packed_residual(self, layers: LayerRange, items: Sequence[Item]) -> torch.Tensor:
        layout, rows = self._lay_out(items)
        if self._fused is not None:
            return self._fused.residual(layers, rows, layout)
        with laid_out(layout) as cache:
            return self._passes.residual(layers, rows, layout.positions(), cache)

    def _run_packed(self, layers: LayerRange, items: Sequence[Item], head: bool) -> list[torch.Tensor]:
        keep = [slice(0, 0)] * len(items)
        offset = 0
        for i, item in enumerate(items):
            keep[i] = slice(offset + item.n - item.emit, offset + item.n)
            offset += item.n
        if head and any(item.emit for item in items):
            out = self._packed_logits(layers, items, keep)
        else:
            residual = self._packed_residual(layers, items)
            out = self._split_residual(items, residual, head)
        for item in items:
            item.state.have = item.start + item.n
        return out

    def _packed_logits(self, layers: LayerRange, items: Sequence[Item], keep: Sequence[slice]) -> list[torch.Tensor]:
        layout, rows = self._lay_out(items)
        wanted = [row for part in keep for row in range(part.start, part.stop)]
        padded = wanted + [wanted[-1]] * (self._computed_rows(len(wanted)) - len(wanted))
        if self._fused is not None:
            logits = self._fused.logits(self._fused.residual(layers, rows, layout)[padded])
        else:
            with laid_out(layout) as cache:
                logits = self._passes.logits(layers, rows, layout.positions(), cache, torch.tensor(padded))
        return list(logits[: len(wanted)].float().split([item.emit for item in items]))

    def _split_residual(self, items: Sequence[Item], residual: torch.Tensor, head: bool) -> list[torch.Tensor]:
        out, offset = [], 0
        for item in items:
            part = residual[offset : offset + item.n]
            item.state.log(item.start, part)
            offset += item.n
            out.append(self._nothing(head) if head else part[item.n - item.emit :])
        return out

    # --- one session at a time ----------------------------------------------------------------------------------------

    def _cache_of(self, state: SessionState, layers: LayerRange) -> StageCache:
        if not isinstance(state, SingleState):
            raise TypeError("the state is not one of this stage")
        if state.cache is None:
            self._passes.focus(layers)
            state.cache = StageCache.of(self._skeleton.config, typed=self._typed_caches)
        return state.cache

    def _begin_anew(self, item: Item) -> None:
        """Forget a session whose frequencies change with this step, in an architecture that has no keys of both kinds."""
        limit, state = self._passes.begins_anew_at, item.state
        if limit is None or not isinstance(state, SingleState) or max(item.prompt_len, state.counts_as) > limit:
            return
        if item.start + item.n > limit:
            state.forget()
            state.counts_as = item.start + item.n

    def _run_single(self, layers: LayerRange, items: Sequence[Item], head: bool) -> list[torch.Tensor]:
        out = []
        for item in items:
            cache = self._cache_of(item.state, layers)
            try:
                out.append(self._one(layers, item, cache, head))
            except BaseException:
                if isinstance(item.state, SingleState):
                    item.state.forget()  # some layers have the rows and some have not
                raise
            item.state.have = item.start + item.n
        return out

    def _one(self, layers: LayerRange, item: Item, cache: StageCache, head: bool) -> torch.Tensor:
        counts_as = item.state.counts_as if isinstance(item.state, SingleState) else 0
        self._passes.count_as(max(item.prompt_len, counts_as))
        quiet = item.n - item.emit
        if not head:
            residual = self._single_residual(layers, item.start, item.rows, cache)
            item.state.log(item.start, residual)
            return residual[quiet:]
        parts = []
        for piece in self._pieces(item.start, item.n):
            positions = torch.arange(item.start + piece.start, item.start + piece.stop)[None]
            if piece.stop <= quiet:  # nothing of it is asked for
                self._passes.residual(layers, item.rows[piece], positions, cache)
            else:
                keep = torch.arange(max(piece.start, quiet), piece.stop) - piece.start
                parts.append(self._passes.logits(layers, item.rows[piece], positions, cache, keep).float())
            cache.seen = item.start + piece.stop
        return torch.cat(parts) if parts else self._nothing(head)

    def _single_residual(self, layers: LayerRange, start: int, rows: torch.Tensor, cache: StageCache) -> torch.Tensor:
        parts = []
        for piece in self._pieces(start, len(rows)):
            positions = torch.arange(start + piece.start, start + piece.stop)[None]
            parts.append(self._passes.residual(layers, rows[piece], positions, cache))
            cache.seen = start + piece.stop
        return torch.cat(parts)

    def _pieces(self, start: int, n: int) -> list[slice]:
        """What of ``n`` rows goes through the model at once."""
        return [slice(i, i + 1) for i in range(n)] if self._row_by_row and start else [slice(0, n)]

    # --- start --------------------------------------------------------------------------------------------------------

    def _decide_packing(self) -> bool:
        """Pack if the architecture allows it. What runs is tried on the loaded layers; ModelRefused if nothing is right."""
        skeleton = self._skeleton
        kind = skeleton.config.model_type
        why = packing.may_pack(skeleton.config)
        if why is None:
            packing.use_packed(skeleton)
            self.packs = True
            if packing.agrees(self._passes, self._chunks):
                return True
            why = f"{kind} runs one session at a time: its packed results differ here"
        self.warnings.append(why)
        packing.use_plain(skeleton)
        self.packs = False
        # Recurrent layers of some architectures take rows behind a state only one by one.
        for self._typed_caches, self._row_by_row in ((True, False), (False, False), (True, True)):
            if packing.agrees(self._passes, self._chunks):
                return False
        raise ModelRefused(
            f"{kind} cannot be served: this version of transformers computes something else with a cache than without;"
            " take a model of another architecture"
        )

    def _chunks(self, layers: LayerRange, rows: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        state = PackedState(layers, logs=True) if self.packs else SingleState(layers, logs=True)
        start = 0
        for end in ends:
            item = Item(state, start, end - start, 0, packing.prompt_of(len(rows)), rows[start:end])
            self._run(layers, [item], head=False)
            start = end
        return state.boundary(0, start)

    def _swap_linears(self, prepack: str, budget_bytes: int | None) -> str:
        """Put faster linears in; returns the name of what runs."""
        model = self._skeleton.model
        copy = sum(child.weight.nbytes for _, _, child in linears.linears(model) if isinstance(child, torch.nn.Linear))
        fits = budget_bytes is None or self._count_private() + copy <= budget_bytes
        if self.dtype == "int8":
            path, make = "int8 widened" if linears.widens() else "int8", linears.quantise
        elif self.dtype == "bf16" and (prepack == "on" or (prepack == "auto" and fits)):
            path, make = "prepacked", linears.prepack
        else:
            return "plain"
        if self.packs and self._fuse(make):
            return f"{fused.ARITHMETIC} {path}"
        swapped = linears.swap(model, make) > 0 if self.packs else self._swap_checked(make)
        return path if swapped else "plain"

    def _spare_head(self) -> None:
        """Of a prompt one row meets the head: for that the widest of all weights need not become bf16."""
        head = self._skeleton.model.get_output_embeddings() if self._fused is None else self._fused.head
        if isinstance(head, linears.Int8Linear):
            head.widened = None

    def _swap_checked(self, make: linears.Swap) -> bool:
        """True if faster linears run. Some architectures use a linear's weights without calling it (Mamba its step's), and the
        drop-ins have none: there the plain ones stay."""
        skeleton, passes = self._skeleton, self._passes
        before = packing.sample_output(passes)
        passes.focus(self.layers)
        plain = list(linears.linears(skeleton.model))
        made = linears.swap(skeleton.model, make)
        after = packing.sample_output(passes)
        passes.focus(self.layers)
        right = before is not None and after is not None and packing.near(skeleton, after[0], *before)
        if made and not right:
            kind = skeleton.config.model_type
            if self.dtype == "int8":
                raise ModelRefused(f"{kind} does not compute the same with int8 weights; use bf16")
            for owner, name, child in plain:
                setattr(owner, name, child)
            self.warnings.append(f"{kind} does not compute the same with prepacked weights; they are off")
            return False
        return made > 0

    def _count_private(self) -> int:
        """Bytes of weights that are not pages of the checkpoint's files."""
        model, holds = self._skeleton.model, self._skeleton.checkpoint.holds
        copies = [child for root in (model, self._fused) if root is not None for _, _, child in linears.linears(root)]
        return sum(int(getattr(child, "nbytes", 0)) for child in copies) + sum(
            tensor.nbytes for tensor in model.parameters() if not tensor.is_meta and not holds(tensor)
        )

    def _fuse(self, make: linears.Swap) -> bool:
        """Use the fused layers where the architecture has them and they compute what the modules compute."""
        if not fused.fits(self._skeleton):
            return False
        try:
            self._fused = fused.FusedLayers(self._skeleton, make)
        except NotImplementedError:
            return False
        if not packing.agrees(self._passes, self._chunks):
            self._fused = None
            self.warnings.append("the fused layers differ from the architecture's own here; they are off")
            return False
        self._fused.release(self._skeleton)
        return True

    def _prove(self) -> bool:
        """Turn on what makes arithmetic deterministic, and try it; a warning says so where it does not hold."""
        if not self.packs:
            self.warnings.append("deterministic arithmetic is off: sessions are not packed")
            return False
        if self._skeleton.torch_dtype != torch.bfloat16:
            self.warnings.append(f"deterministic arithmetic is off: it is for bf16 and int8, not {self.dtype}")
            return False
        self._passes.focus(self.layers)
        self.blocks = arithmetic.steady(self._skeleton.model if self._fused is None else self._fused)
        if self.dtype != "int8":
            self._computed_rows = arithmetic.in_few_sizes
        trouble = arithmetic.trial(self, self._skeleton)
        if (
            trouble and self.dtype == "int8"
        ):  # its products are steady at one row too; what stands between them may not be
            self._computed_rows = arithmetic.at_least_two
            trouble = arithmetic.trial(self, self._skeleton)
        if trouble:
            self.warnings.append(f"deterministic arithmetic is off: {trouble}")
            return False
        return True

    def _token_bytes_of(self, layers: LayerRange) -> int:
        """Bytes per token of a session on ``layers``, found by running it once."""
        if layers not in self._token_bytes:
            self._token_bytes[layers] = self._measure_token_bytes(layers)
        return self._token_bytes[layers]

    @torch.inference_mode()
    def _measure_token_bytes(self, layers: LayerRange) -> int:
        # a buffer's smallest length; states that do not grow are spread over as many tokens
        n = self._skeleton.at_most(GRAIN_TOKENS)
        rows = torch.zeros(n, self.hidden_size, dtype=self._skeleton.torch_dtype)
        log = rows.nbytes // n if layers.end < self.num_layers else 0
        if self.packs:
            packed = PackedState(layers, logs=False)
            self._packed_residual(layers, [Item(packed, 0, 2, 0, 2, rows[:2])])
            return log + packed.nbytes // GRAIN_TOKENS
        cache = self._cache_of(SingleState(layers, logs=False), layers)
        self._passes.residual(layers, rows, torch.arange(n)[None], cache)
        return log + -(-cache.nbytes // n)
