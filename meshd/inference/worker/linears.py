"""Drop-ins for `torch.nn.Linear`: prepacked bf16, int8 weights, and rows in fixed blocks.

Prepacking hands oneDNN a private copy in its own layout: about twice as fast at few rows on CPUs with bf16 instructions. The
operators are torch's private ones, so they are tried on every shape and the plain linear stays where anything is odd. int8
weights are one scale per output row. How many rows a kernel takes before it sums in another order is `arithmetic`'s to find out;
blocks of that many keep a row's bits.

The kernel for int8 weights reads half the bytes, but its time grows with every row: 128 rows take ten times as long as in bf16
(measured). So the rows of prompts (`of_prompts`) are multiplied with weights that are made bf16 on the way, a cache's worth at a
time. A row's place in its session alone decides which of the two it meets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from meshd.errors import ModelRefused

# Inputs at a time: at other widths the kernel reads beyond its operands and ends the process (measured).
_INT8_GRAIN = 16
UNLIMITED = 1 << 30  # rows at a time, where nothing asks for blocks
_TILE_WEIGHTS: Final = 1 << 20  # made bf16 at a time: they and what they are made of stay in a core's cache
_prompts: Final[ContextVar[bool]] = ContextVar("_prompts", default=False)
Swap = Callable[[nn.Linear], nn.Module | None]

# Linears that choose experts: small, and a choice must not be coarsened by int8.
CHOOSERS = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Stands for a weight that a drop-in no longer has: some modules ask it for its dtype. Computing with it raises; with a
    tensor that has no memory it would not, and give whatever lay there."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightFacts:
        return cls(weight.dtype, weight.device, weight.shape)


class RowBlocks(nn.Module):
    """What the drop-ins share: any shape of ``x``, at most ``rows`` rows in one call of `product`."""

    in_features: int
    out_features: int
    rows: int

    @classmethod
    def like(cls, linear: nn.Linear) -> nn.Module:
        """Of the same kind, with the weights of ``linear``."""
        return cls(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def run(self, flat: torch.Tensor) -> torch.Tensor:
        """``[n, in] -> [n, out]``, in blocks of the rows that keep their bits."""
        return self.product(flat) if flat.shape[0] <= self.rows else in_blocks(self.product, flat, self.rows)

    def product(self, flat: torch.Tensor) -> torch.Tensor:
        """``[n, in] -> [n, out]`` in one call."""
        raise NotImplementedError


class PrepackedLinear(RowBlocks):
    """A bf16 linear whose weight oneDNN has laid out for itself."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), 1)
        self.weight = WeightFacts.of(linear.weight)
        self.nbytes = linear.weight.nbytes
        self.rows = UNLIMITED

    def product(self, flat: torch.Tensor) -> torch.Tensor:
        """``[n, in] -> [n, out]`` in one call."""
        return torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, "none", [], "")


class Int8Linear(RowBlocks):
    """Weights as int8 with one scale per output row; activations stay bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach().float()
        # Rounded before it divides: what comes out is multiplied by the rounded one, and a row must not be off by half a per
        # cent (measured: 95.2 % instead of 94.4 % of greedy choices as in bf16).
        scales = (weight.abs().amax(1) / 127).clamp_min(1e-12).to(linear.weight.dtype)
        quantised = (weight / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.weight = WeightFacts.of(linear.weight)
        self.missing = -linear.in_features % _INT8_GRAIN
        quantised = functional.pad(quantised, (0, self.missing))
        self.register_buffer("quantised", quantised, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.nbytes = quantised.nbytes
        self.rows = UNLIMITED
        self.widened = Widened(self) if widens() else None

    def run(self, flat: torch.Tensor) -> torch.Tensor:
        """``[n, in] -> [n, out]``."""
        return self.widened.run(flat) if self.widened is not None and _prompts.get() else super().run(flat)

    def product(self, flat: torch.Tensor) -> torch.Tensor:
        """``[n, in] -> [n, out]`` in one call."""
        if self.missing:
            flat = functional.pad(flat, (0, self.missing))
        out = torch._weight_int8pack_mm(flat, self.quantised, self.scales)
        return out if self.bias is None else out + self.bias


class Widened(RowBlocks):
    """The linear of an `Int8Linear` with its weights in bf16, which they are only while they are multiplied with."""

    def __init__(self, small: Int8Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = small.in_features, small.out_features
        self.bias = small.bias
        self.rows = UNLIMITED
        self._quantised, self._scales = small.quantised, small.scales

    @classmethod
    def like(cls, linear: nn.Linear) -> nn.Module:
        widened = Int8Linear(linear).widened
        assert widened is not None, "there is one to be like"  # noqa: S101 - the caller has it
        return widened

    def run(self, flat: torch.Tensor) -> torch.Tensor:
        """``[n, in] -> [n, out]``: all rows meet a part of the weights before the next is made."""
        n = len(flat)
        if n == 1:  # takes another kernel
            return self.run(functional.pad(flat, (0, 0, 0, 1)))[:1]
        out = flat.new_empty(n, self.out_features)
        tile = max(1, _TILE_WEIGHTS // self.in_features)
        for start in range(0, self.out_features, tile):
            part = slice(start, start + tile)
            weight = self._quantised[part, : self.in_features] * self._scales[part, None]
            multiply = partial(functional.linear, weight=weight)
            out[:, part] = multiply(flat) if n <= self.rows else in_blocks(multiply, flat, self.rows)
        return out if self.bias is None else out.add_(self.bias)


def widens() -> bool:
    """True where products in bf16 are so much faster that making weights bf16 pays. Elsewhere they are slower than int8 ones."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def of_prompts() -> Iterator[None]:
    """Within this context all rows are of prompts."""
    token = _prompts.set(True)
    try:
        yield
    finally:
        _prompts.reset(token)


class BlockedLinear(RowBlocks, nn.Linear):
    """A plain linear that runs on at most ``rows`` rows at a time, and never on one row that has been cut off."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = UNLIMITED

    def product(self, flat: torch.Tensor) -> torch.Tensor:
        """``[n, in] -> [n, out]`` in one call."""
        return functional.linear(flat, self.weight, self.bias)


def in_blocks(run: Callable[[torch.Tensor], Any], flat: torch.Tensor, rows: int) -> Any:
    """``run`` on every ``rows`` rows of ``flat``; outputs (one tensor or several) are joined. A last single row gets company."""
    last = len(flat) % rows == 1
    whole = functional.pad(flat, (0, 0, 0, 1)) if last else flat
    parts = [run(block) for block in whole.split(rows)]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(outputs)[: len(flat)] for outputs in zip(*parts, strict=True))
    return torch.cat(parts)[: len(flat)]


def straighten(root: nn.Module) -> None:
    """Replace transposed linears (GPT-2's) by ordinary ones, so that they can be prepacked and blocked too."""
    for owner in root.modules():
        for name, child in list(owner.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(1, 1, bias=child.bias is not None)
                linear.in_features, linear.out_features = child.weight.shape
                linear.weight = nn.Parameter(child.weight.detach().T.contiguous(), requires_grad=False)
                linear.bias = child.bias
                setattr(owner, name, linear)


def routers(root: nn.Module) -> Iterator[nn.Module]:
    """Modules that choose experts with a weight of their own, without a linear: leaves with a matrix called ``weight`` that are
    no norms (which have one row of weights for each head)."""
    for module in root.modules():
        matrix = module._parameters.get("weight")
        known = isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd) or any(
            hasattr(module, epsilon) for epsilon in ("variance_epsilon", "eps")
        )
        if matrix is not None and matrix.dim() == 2 and not known and not any(True for _ in module.children()):
            yield module


def linears(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every linear below ``root``, plain or ours, as (owner, attribute, module)."""
    for owner in root.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.Linear | RowBlocks):
                yield owner, name, child


def prepack(linear: nn.Linear) -> nn.Module | None:
    """A prepacked drop-in, or None where this machine's torch cannot do it faithfully."""
    if linear.weight.dtype != torch.bfloat16:
        return None
    try:
        packed = PrepackedLinear(linear)
        probe = torch.linspace(-1, 1, 2 * linear.in_features).to(torch.bfloat16).view(2, -1)
        if _close(packed(probe), functional.linear(probe, linear.weight, linear.bias)):
            return packed
    except (RuntimeError, AttributeError, NotImplementedError):
        pass
    return None


def quantise(linear: nn.Linear) -> nn.Module | None:
    """An int8 drop-in. Raises ModelRefused where this machine's torch has no such kernel."""
    try:
        small = Int8Linear(linear)
        small(torch.zeros(2, linear.in_features, dtype=linear.weight.dtype))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        raise ModelRefused(f"int8 does not work here: {str(error).splitlines()[0]}; use bf16") from None
    return small


def swap(root: nn.Module, make: Swap) -> int:
    """Replace plain linears below ``root`` by what ``make`` returns (None keeps one). Returns how many were replaced."""
    made = 0
    for owner, name, child in list(linears(root)):
        if type(child) is nn.Linear and name not in CHOOSERS:
            new = make(child)
            if new is not None:
                setattr(owner, name, new)
                made += 1
    return made


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (got.float() - expected.float()).norm()
    return bool(error <= 0.02 * expected.float().norm() + 1e-6)
