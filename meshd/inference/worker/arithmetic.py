"""Deterministic arithmetic: its rules, their trial on this machine, and the name that says which arithmetic runs.

The rules (bf16 on CPU): attention as in `attention`; no linear ever sees one row alone, since one row takes another kernel; a
linear whose rows change in longer batches runs in blocks. Then a row's bits are the same alone, batched, re-chunked and
replayed. Kernels differ between machines, so the rules are tried at every start on the shapes that will run.

`name` hashes what decides the bits: dtype, path, torch version, instruction set, and the bits of a fixed computation. Nodes with
equal names give equal answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import torch
from torch import nn
from torch.nn import functional

from meshd.inference.worker import linears, packing
from meshd.inference.worker.item import Item
from meshd.inference.worker.kv import PackedState, SessionState
from meshd.inference.worker.skeleton import Skeleton
from meshd.vocabulary import LayerRange

MIN_ROWS: Final = 2
_BATCHES: Final = (3, 8, 33, 64, 130)
_BLOCKS: Final = (64, 32, 8, 2)
_TRIAL_FLOPS: Final = 4e9  # per shape: batches beyond it are left to the other checks
_PROMPT: Final = 70
_ANSWER: Final = 4


class Steps(Protocol):
    """The part of a stage that the trial drives."""

    def state(self, layers: LayerRange | None = None) -> SessionState: ...
    def step(self, layers: LayerRange, items: Sequence[Item]) -> list[torch.Tensor]: ...
    def lm_head(self, rows: torch.Tensor) -> torch.Tensor: ...


def block_unsteady(model: nn.Module) -> list[str]:
    """Run linears whose rows change with the batch in blocks that keep them. Returns what was done, for the record."""
    blocks: dict[tuple[str, int, int], int | None] = {}
    done: list[str] = []
    for owner, name, child in list(linears.linears(model)):
        shape = (type(child).__name__, int(child.out_features), int(child.in_features))
        if shape not in blocks:
            blocks[shape] = _steady_rows(child)
            if blocks[shape] is not None:
                done.append(f"{shape[1]}x{shape[2]} in blocks of {blocks[shape]}")
        rows = blocks[shape]
        if rows is not None:
            setattr(owner, name, linears.BlockedLinear(child, rows))
    return done


def _steady_rows(linear: nn.Module) -> int | None:
    """None if rows keep their bits in every batch tried, else the largest block in which they do."""
    flops_per_row = 2 * linear.out_features * linear.in_features
    batches = [n for n in _BATCHES if n * flops_per_row <= _TRIAL_FLOPS] or [_BATCHES[0]]
    source = torch.Generator().manual_seed(11)
    x = torch.randn(max(batches), linear.in_features, generator=source).to(torch.bfloat16)
    padded = torch.cat([x, x[:1]]) if len(x) % MIN_ROWS else x
    alone = torch.cat([linear(pair) for pair in padded.split(MIN_ROWS)])
    if all(torch.equal(linear(x[:n]), alone[:n]) for n in batches):
        return None
    for rows in _BLOCKS:
        if rows < max(batches) and all(
            torch.equal(linear(part), alone[at : at + len(part)]) for at, part in _cut(x, rows)
        ):
            return rows
    return MIN_ROWS


def _cut(x: torch.Tensor, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Every size up to ``rows`` somewhere in ``x``."""
    for size in {2, 3, rows // 2, rows - 1, rows}:
        if size >= MIN_ROWS:
            for at in range(0, len(x) - size + 1, size):
                yield at, x[at : at + size]


def trial(stage: Steps, skeleton: Skeleton) -> str | None:
    """Compute one session alone, re-chunked in company, and in one replay; None if all bits are equal, else what differs."""
    layers = packing.sample_range(skeleton)
    total = _PROMPT + _ANSWER
    rows = packing.sample_rows(skeleton, total)
    alone, alone_state = _walk(stage, layers, rows, [_PROMPT] + [1] * _ANSWER)
    mixed, mixed_state = _walk(
        stage, layers, rows, [1, 33, 31, 5, 1, 2, 1], company=packing.sample_rows(skeleton, 90, 8)
    )
    replayed, replayed_state = _walk(stage, layers, rows, [total])
    for what, got, state in (("in company", mixed, mixed_state), ("replayed", replayed, replayed_state)):
        if not torch.equal(alone, got):
            return f"rows computed {what} differ from those computed alone"
        if not _same_kv(alone_state, state, total):
            return f"keys and values computed {what} differ from those computed alone"
    if skeleton.last:
        hidden = alone[:24] if layers.end < skeleton.num_layers else packing.sample_rows(skeleton, 24)
        if hidden.is_floating_point():
            few = torch.cat([stage.lm_head(hidden[i : i + 1]) for i in range(3)])
            if not torch.equal(few, stage.lm_head(hidden)[:3]):
                return "logits of one row differ from those of many"
    return None


def _walk(
    stage: Steps, layers: LayerRange, rows: torch.Tensor, sizes: Sequence[int], company: torch.Tensor | None = None
) -> tuple[torch.Tensor, SessionState]:
    """One session through ``layers`` in steps of ``sizes``, all outputs; ``company`` is another session's rows beside it."""
    state, other = stage.state(layers), stage.state(layers)
    parts, start, beside = [], 0, 0
    for size in sizes:
        items = [Item(state, start, size, size, _PROMPT, rows[start : start + size])]
        if company is not None:
            n = min(len(company) - beside, 1 + start // 2)
            other_item = Item(other, beside, n, n, len(company) // 2, company[beside : beside + n])
            items = [other_item, *items] if n else items
            beside += n
        parts.append(stage.step(layers, items)[-1])
        start += size
    return torch.cat(parts), state


def _same_kv(one: SessionState, two: SessionState, tokens: int) -> bool:
    if not (isinstance(one, PackedState) and isinstance(two, PackedState)):
        return False
    pairs = zip([*one.keys, *one.values], [*two.keys, *two.values], strict=True)
    return all(a is not None and b is not None and torch.equal(a[:, :tokens], b[:, :tokens]) for a, b in pairs)


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """The linears that choose experts: small, and their choices must not be coarsened by int8."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in ("gate", "router", "shared_expert_gate"):
            yield module


def name(skeleton: Skeleton, *, path: str, packs: bool, deterministic: bool) -> str:
    """A short hash; equal hashes promise equal bits where both are deterministic."""
    digest = hashlib.sha256()
    facts = (skeleton.dtype, path, packs, deterministic, torch.__version__, torch.backends.cpu.get_cpu_capability())
    digest.update(repr(facts).encode())
    for bits in _sample_bits(skeleton, prepacked=path == "prepacked"):
        digest.update(bits.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _sample_bits(skeleton: Skeleton, *, prepacked: bool) -> Iterator[torch.Tensor]:
    """A fixed computation with this model's sizes and this path's kernels: it tells instruction sets apart."""
    source = torch.Generator().manual_seed(5)
    width = skeleton.hidden_size
    dtype = skeleton.torch_dtype
    linear = nn.Linear(width, min(4 * width, 4096), bias=False)
    linear.weight = nn.Parameter(torch.randn(linear.weight.shape, generator=source).to(dtype), requires_grad=False)
    run = (linears.prepack(linear) if prepacked else None) or linear
    for rows in (2, 32):
        x = torch.randn(rows, width, generator=source).to(dtype)
        yield run(x)
        yield functional.silu(x)
        yield functional.rms_norm(x, (width,))
    query = torch.randn(2, 4, 3, 64, generator=source).to(dtype)
    keys = torch.randn(2, 4, 128, 64, generator=source).to(dtype)
    mask = torch.arange(128).view(1, 1, 1, -1) <= 100
    yield functional.scaled_dot_product_attention(query, keys, keys.flip(-2), attn_mask=mask)
