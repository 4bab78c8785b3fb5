"""How an architecture's sessions are run: packed or one at a time, decided by a list and then by trying it.

The list names architectures whose packed results were compared with transformers' own. On top of it the loaded layers
themselves are run at start, in chunks with a cache and in one go without: a kind of attention that the packed function does not
serve, or a cache that does not fit the model, would otherwise give wrong answers without any error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch

from meshd.errors import ModelRefused
from meshd.inference.worker import longrope
from meshd.inference.worker.attention import NAME
from meshd.inference.worker.passes import Passes
from meshd.inference.worker.skeleton import Skeleton
from meshd.vocabulary import LayerRange

PACKABLE: Final = frozenset({
    "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi", "phi3",
    "olmo2", "olmoe", "granite", "granitemoe", "cohere", "cohere2", "smollm3", "glm4", "gpt_oss", "stablelm", "starcoder2",
    "exaone4", "nemotron", "gpt2", "gpt_neox", "opt", "apertus", "arcee", "cwm", "ernie4_5", "ernie4_5_moe", "exaone",
    "flex_olmo", "glm", "glm4_moe", "gpt_bigcode", "granite_swa", "granitemoe_swa", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3", "minimax_m2", "ministral", "ministral3", "olmo", "olmo3",
    "persimmon", "seed_oss", "vaultgemma",
})  # fmt: skip
# Rotary frequencies that depend on a text's length would let one session change another's. Those called dynamic do not: they
# change where the model's positions end, and so does every session.
_LENGTH_BOUND_ROPE: Final = frozenset({longrope.KIND})
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}  # honest bf16 noise is below 0.01
_INT8_TOLERANCE: Final = 0.2  # the other side of the comparison has bf16 weights
_OUTLIERS: Final = 0.1  # in reduced precision noise may send a few rows to other experts; a wrong mask hits most rows
# Whatever an architecture's code raises when it is cut, or is given a cache that it does not know.
_FOREIGN: Final = (RuntimeError, LookupError, TypeError, AttributeError, ValueError, AssertionError)
_TRIAL_ROWS: Final = 40
_FEW_ROWS: Final = 8
_ANSWERED: Final = 5  # one in so many of the rows of a trial uses row arithmetic
_TRIAL_WINDOW: Final = 12
_TRIAL_SCALE: Final = 1 / 8  # small beside what layers add: they norm what enters, so that does not shrink with it


def may_pack(config: Any) -> str | None:
    """None if the text config's architecture is on the list, else why it is not packed."""
    if config.model_type not in PACKABLE:
        return f"{config.model_type} runs one session at a time: packing it is not proven"
    if _rope_types(config) & _LENGTH_BOUND_ROPE:
        return f"{config.model_type} with length-dependent rotary frequencies runs one session at a time"
    return None


def use_packed(skeleton: Skeleton) -> None:
    """Let the modules call our attention function."""
    skeleton.model.set_attn_implementation(NAME)


def use_plain(skeleton: Skeleton) -> None:
    """Let the modules use transformers' attention, the fused one where the architecture has it."""
    try:
        skeleton.model.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        skeleton.model.set_attn_implementation("eager")


def sample_range(skeleton: Skeleton) -> LayerRange:
    """The shortest held range, from its start, that has every kind of layer; bounded, since it is run at each start."""
    kinds = skeleton.per_layer.get("layer_types") or [None] * len(skeleton.held)
    wanted, count = set(kinds), 1
    while set(kinds[:count]) != wanted and count < 8:
        count += 1
    return LayerRange(skeleton.held.start, skeleton.held.start + count)


def sample_rows(skeleton: Skeleton, n: int, seed: int = 7) -> torch.Tensor:
    """``n`` arbitrary inputs of the held range: token ids where it starts the model, else residuals."""
    source = torch.Generator().manual_seed(seed)
    if skeleton.first:
        return torch.randint(0, skeleton.config.vocab_size, (n,), generator=source)
    return torch.randn(n, skeleton.config.hidden_size, generator=source).to(skeleton.torch_dtype)


def prompt_of(rows: int) -> int:
    """How many rows of a trial are its prompt."""
    return rows - rows // _ANSWERED


class Chunks(Protocol):
    """Runs a range for a new session of `prompt_of` its rows, given each step's end: the outputs of all rows."""

    def __call__(self, layers: LayerRange, rows: torch.Tensor, ends: Sequence[int]) -> torch.Tensor: ...


def agrees(passes: Passes, run: Chunks) -> bool:
    """True if ``run`` in two chunks and one row gives what the model gives in one go without a cache."""
    skeleton = passes.skeleton
    tolerance = _INT8_TOLERANCE if skeleton.dtype == "int8" else _TOLERANCE[skeleton.torch_dtype]
    layers = sample_range(skeleton)
    rows = sample_rows(skeleton, skeleton.at_most(_TRIAL_ROWS))
    total = len(rows)
    passes.count_as(prompt_of(total))
    if not skeleton.first:
        rows = rows * _TRIAL_SCALE
    implementation = skeleton.config._attn_implementation
    with _small_windows(skeleton):
        try:
            chunked = run(layers, rows, sorted({max(1, total * 3 // 5), max(1, total - 1), total}))
        except _FOREIGN:
            return False
        skeleton.model.set_attn_implementation("eager")
        try:
            plain = passes.residual(layers, rows, torch.arange(total)[None], None)
        except _FOREIGN as reason:
            raise ModelRefused(f"{skeleton.config.model_type} does not run as layers {layers}: {reason}") from None
        finally:
            skeleton.model.set_attn_implementation(implementation)
    entered = passes.embed(rows) if skeleton.first else rows
    moved = plain.float() - entered.float()
    error = (chunked.float() - plain.float()).norm(dim=-1)
    # Where a layer adds little to a residual, as new weights do, rounding the sum alone exceeds the tolerance of what it adds.
    rounding = torch.finfo(skeleton.torch_dtype).eps / 2 * plain.float().norm(dim=-1)
    wrong = (error > tolerance * moved.norm(dim=-1) + rounding + 1e-6) | ~error.isfinite()
    allowed = 0 if skeleton.torch_dtype == torch.float32 else _OUTLIERS * total
    return int(wrong.sum()) <= allowed


def sample_output(passes: Passes) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the loaded layers make of a few rows, and what enters them; None where they cannot be run. Leaves the focus on the
    rows' range."""
    skeleton = passes.skeleton
    rows = sample_rows(skeleton, skeleton.at_most(_FEW_ROWS))
    passes.count_as(len(rows))
    try:
        entered = passes.embed(rows) if skeleton.first else rows
        made = passes.residual(sample_range(skeleton), rows, torch.arange(len(rows))[None], None)
    except _FOREIGN:
        return None
    return made.float(), entered.float()


def near(skeleton: Skeleton, got: torch.Tensor, expected: torch.Tensor, entered: torch.Tensor) -> bool:
    """True if layers made ``got`` of what ``entered`` where they made ``expected`` before, but for rounding."""
    tolerance = _INT8_TOLERANCE if skeleton.dtype == "int8" else _TOLERANCE[skeleton.torch_dtype]
    rounding = torch.finfo(skeleton.torch_dtype).eps / 2 * expected.norm()
    return bool((got - expected).norm() <= tolerance * (expected - entered).norm() + rounding)  # not for NaN either


@contextmanager
def _small_windows(skeleton: Skeleton) -> Iterator[None]:
    """Shrink sliding windows below the trial's length, so that they matter."""
    holders = {id(skeleton.config): skeleton.config, id(skeleton.decoder.config): skeleton.decoder.config}
    owners = [*holders.values(), *(module for layer in skeleton.layers for module in layer.modules())]
    saved = [
        (owner, owner.sliding_window) for owner in owners if isinstance(getattr(owner, "sliding_window", None), int)
    ]
    for owner, _ in saved:
        owner.sliding_window = _TRIAL_WINDOW
    try:
        yield
    finally:
        for owner, window in saved:
            owner.sliding_window = window


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    found = {layer.get("rope_type", layer.get("type")) for layer in [parameters, *nested]}
    return {kind for kind in found if isinstance(kind, str)}
