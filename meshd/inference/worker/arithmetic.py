"""Deterministic arithmetic: its rules, their trial on this machine, and the name that says which arithmetic runs.

The rules (bf16 on CPU): attention as in `attention`; no linear ever sees one row alone, since one row takes another kernel; and
none sees more rows than its kernel adds up in the same order. Then a row's bits are the same alone, batched, re-chunked and
replayed. Measured on AMX and AVX-512: plain linears keep the order up to 32 rows, prepacked ones to 128 or, for long sums, 32;
int8 ones always; beyond that about one result in a thousand differs in its last bit, which random inputs rarely show.

So linears and attention are tried with sums that cancel: u*v - u*v is zero but for rounding, and what rounding leaves depends on
every step of the summation. `trial` then runs the real layers alone, in company and replayed.

`name` hashes what decides the bits: dtype, path, torch version, instruction set, and the bits of a fixed computation. Nodes with
equal names give equal answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn import functional

from meshd.inference.worker import attention, linears, packing
from meshd.inference.worker.item import Item
from meshd.inference.worker.kv import PackedState, SessionState
from meshd.inference.worker.skeleton import Skeleton
from meshd.vocabulary import LayerRange

MIN_ROWS: Final = 2
PLAIN_ROWS: Final = 32  # for products that are no module of their own
_LADDER: Final = ((2, (2,)), (8, (3, 5, 8)), (32, (17, 31, 32)), (64, (33, 48, 64)), (128, (65, 100, 128)))
_SAMPLE_WEIGHTS: Final = 1 << 24  # a trial's matrix is cut to this many weights
_SAMPLE_OUTPUTS: Final = 256
_PROMPT: Final = 70
_ANSWER: Final = 4
_PIECES: Final = (1, 33, 31, 5, 1, 2, 1)  # of both together
_COMPANY: Final = 90
_ROUNDING: Final = 2  # another number when what this project computes itself (experts, sinks) rounds elsewhere


def at_least_two(rows: int) -> int:
    """How many rows a step of ``rows`` computes where any number but one is steady."""
    return max(MIN_ROWS, rows)


def in_few_sizes(rows: int) -> int:
    """As `at_least_two`, in one of a few sizes. oneDNN makes code for each number of rows a product has: 7 ms and 0.6 MB for each
    shape of weights (measured), which sessions that come and go would ask for at every new number."""
    grain = 4 if rows <= 16 else 16 if rows <= 128 else 32
    return MIN_ROWS if rows <= MIN_ROWS else -(-rows // grain) * grain


class Steps(Protocol):
    """The part of a stage that the trial drives."""

    def state(self, layers: LayerRange | None = None) -> SessionState: ...
    def step(self, layers: LayerRange, items: Sequence[Item]) -> list[torch.Tensor]: ...
    def lm_head(self, rows: torch.Tensor) -> torch.Tensor: ...


def steady(model: nn.Module) -> list[str]:
    """Let every linear run on no more rows than its kernel keeps steady. Returns the block of each shape, for the record."""
    blocks: dict[tuple[str, int, int, bool], int] = {}
    for owner, name, child in list(linears.linears(model)):
        shape = (type(child).__name__, int(child.out_features), int(child.in_features), child.bias is not None)
        if shape not in blocks:
            blocks[shape] = steady_rows(child)
        limited = linears.BlockedLinear(child) if type(child) is nn.Linear else child
        limited.rows = blocks[shape]
        setattr(owner, name, limited)
    for router in linears.routers(model):
        router.forward = partial(_routed, router.forward)
    return [f"{kind} {out}x{into}: {rows}" for (kind, out, into, _), rows in blocks.items()]


def _routed(run: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or hidden.shape[:-1].numel() <= PLAIN_ROWS:
        return run(hidden, *args, **kwargs)
    return linears.in_blocks(run, hidden.reshape(-1, hidden.shape[-1]), PLAIN_ROWS)


def steady_rows(linear: nn.Module) -> int:
    """Up to how many rows a linear of this kind and shape gives each row the bits it has in a pair."""
    into = int(linear.in_features)
    out = max(1, min(int(linear.out_features), _SAMPLE_WEIGHTS // into))
    source = torch.Generator().manual_seed(11)
    # as many outputs as the real one has, since kernels are chosen by size, but of a few different ones: drawing is slow
    half = torch.randn(min(out, _SAMPLE_OUTPUTS), into // 2, generator=source).to(torch.bfloat16)
    model = nn.Linear(1, 1, bias=False)
    model.out_features, model.in_features = out, into
    weight = torch.zeros(out, into, dtype=torch.bfloat16)
    for part in weight.split(_SAMPLE_OUTPUTS):
        part[:, : 2 * (into // 2)] = torch.cat([half, half], 1)[: len(part)]
    model.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        model.bias = nn.Parameter(torch.zeros(out, dtype=torch.bfloat16), requires_grad=False)
    run = linear.like(model) if isinstance(linear, linears.RowBlocks) else model
    rows = torch.randn(128, into // 2, generator=source)
    x = torch.zeros(128, into, dtype=torch.bfloat16)
    x[:, : 2 * (into // 2)] = torch.cat([rows, -rows], 1)
    head = torch.cat([run(pair) for pair in x[:8].split(MIN_ROWS)])
    good = MIN_ROWS
    for block, sizes in _LADDER:
        for n in sizes:
            got = run(x[:n])
            same = torch.equal(got[:8], head[:n]) and torch.equal(got[-MIN_ROWS:], run(x[n - MIN_ROWS : n]))
            if not same:
                return good
        good = block
    return good


def attention_steady(heads: int, groups: int, width: int) -> bool:
    """True if attention over keys whose values cancel gives a row the same bits in any company."""
    source = torch.Generator().manual_seed(13)
    length, first, scale = 192, 70, width**-0.5
    state = PackedState(LayerRange(0, 1), logs=False)
    keys = torch.randn(groups, length // 2, width, generator=source).to(torch.bfloat16).repeat_interleave(2, 1)
    values = torch.randn(groups, length // 2, width, generator=source).to(torch.bfloat16).repeat_interleave(2, 1)
    values[:, 1::2] *= -1
    state.put(0, 0, keys, values)
    query = torch.randn(length - first, heads, width, generator=source).to(torch.bfloat16)
    for prompt_len in (0, length):
        pieces = [
            (first, length),
            (first, first + 1),
            (first + 1, first + 5),
            (first + 5, length - 1),
            (length - 1, length),
        ]
        made = [
            attention.attend(state, a, query[a - first : b - first], prompt_len=prompt_len, scale=scale)
            for a, b in pieces
        ]
        if not torch.equal(made[0], torch.cat(made[1:])):
            return False
    other = PackedState(LayerRange(0, 1), logs=False)
    other.put(0, 0, keys.flip(1), values.flip(1))
    alone, beside = (
        attention.attend(state, first, query[:1], prompt_len=0, scale=scale, beside=company)
        for company in (None, other)
    )
    return torch.equal(alone, beside)


def trial(stage: Steps, skeleton: Skeleton) -> str | None:
    """Compute one session alone, re-chunked in company, and in one replay; None if all bits are equal, else what differs."""
    config = skeleton.config
    heads, groups = (
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    )
    if not attention_steady(heads, groups, getattr(config, "head_dim", None) or config.hidden_size // heads):
        return "attention gives a row other bits in other company"
    layers = packing.sample_range(skeleton)
    total = skeleton.at_most(_PROMPT + _ANSWER)
    prompt = _prompt_of(total)
    rows = packing.sample_rows(skeleton, total)
    company = packing.sample_rows(skeleton, skeleton.at_most(_COMPANY), 8)
    alone, alone_state = _walk(stage, layers, rows, [prompt] + [1] * (total - prompt))
    mixed, mixed_state = _walk(stage, layers, rows, _within(total, _PIECES), company)
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


def _within(total: int, sizes: Sequence[int]) -> list[int]:
    """``sizes``, cut where they exceed ``total``."""
    ends = [min(end, total) for end in accumulate(sizes)]
    return [end - start for start, end in pairwise([0, *ends]) if end > start]


def _prompt_of(total: int) -> int:
    return max(1, total - _ANSWER)


def _walk(
    stage: Steps, layers: LayerRange, rows: torch.Tensor, sizes: Sequence[int], company: torch.Tensor | None = None
) -> tuple[torch.Tensor, SessionState]:
    """One session through ``layers`` in steps of ``sizes``, all outputs; ``company`` is another session's rows beside it."""
    state, other = stage.state(layers), stage.state(layers)
    parts, start, beside = [], 0, 0
    for size in sizes:
        items = [Item(state, start, size, size, _prompt_of(len(rows)), rows[start : start + size])]
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
    pairs = zip(one.buffers, two.buffers, strict=True)
    return all(a is not None and b is not None and torch.equal(a[:, :, :tokens], b[:, :, :tokens]) for a, b in pairs)


def name(skeleton: Skeleton, *, path: str, packs: bool, deterministic: bool) -> str:
    """A short hash; equal hashes promise equal bits where both are deterministic."""
    digest = hashlib.sha256()
    machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
    facts = (_ROUNDING, skeleton.dtype, path, packs, deterministic, *machine)
    digest.update(repr(facts).encode())
    for bits in _sample_bits(skeleton, prepacked="prepacked" in path):
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
