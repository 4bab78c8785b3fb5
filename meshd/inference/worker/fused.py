"""Llama's family of layers with fewer and larger products: one for q, k and v, one for gate and up.

For decoders of the form norm, attention, add, norm, gated SiLU, add: Llama, Mistral, Qwen2, Qwen3 (which also norms queries and
keys). Computes what transformers' modules compute, in about a third of the operators; the weights are private copies, so this
runs only where linears are copied anyway (prepacked or int8). Attention and KV are those of `attention` and `kv`. Norms and
rotations are the modules' to the bit: with one rounding less, a quarter of what a norm gives was one bit off, and of 48 answers
of small random models in bf16 21 were those of transformers instead of 32 (as many as its own answers without a cache are).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from meshd.inference.worker.attention import Layout, Recipe
from meshd.inference.worker.linears import linears
from meshd.inference.worker.skeleton import Skeleton
from meshd.inference.worker.uniform import Shape, UniformStep
from meshd.vocabulary import LayerRange

FAMILY: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})

ARITHMETIC: Final = "fused 3"  # a part of the arithmetic's name: another one when these layers round elsewhere
_TABLE_STEP: Final = 1024

Make = Callable[[nn.Linear], nn.Module | None]
Run = Callable[[torch.Tensor, int, UniformStep, torch.Tensor, torch.Tensor], torch.Tensor]


class FusedLayer(nn.Module):
    """One decoder layer. The two fused products stand beside the layer's own o and down projections."""

    def __init__(self, layer: Any, shape: Shape, make: Make) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.shape = shape
        self.middle = mlp.gate_proj.out_features
        self.qkv = _made(make, attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _made(make, attention.o_proj)
        self.gate_up = _made(make, mlp.gate_proj, mlp.up_proj)
        self.down = _made(make, mlp.down_proj)
        self.norms = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        self.head_norm = _head_norm(attention, shape) if hasattr(attention, "q_norm") else None
        window = getattr(attention, "sliding_window", None)
        if not hasattr(attention, "sliding_window") and attention.config.model_type == "mistral":
            window = attention.config.sliding_window  # Mistral's layers ask their config at each step
        self.recipe = Recipe(attention.scaling, window=window)

    def bound(self) -> Run:
        """The layer as a function: a module asks for its parts by name at each call, which costs as much as the small
        operators themselves."""
        shape, middle, recipe, head_norm = self.shape, self.middle, self.recipe, self.head_norm
        qkv, out, gate_up, down = (part.run for part in (self.qkv, self.out, self.gate_up, self.down))
        before, between = self.norms
        all_heads = shape.heads + 2 * shape.groups

        def run(x: torch.Tensor, number: int, step: UniformStep, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            rows = qkv(before(x)).view(-1, all_heads, shape.width)
            if head_norm is not None:
                asking, values = rows.split((shape.heads + shape.groups, shape.groups), 1)
                rows = torch.cat((head_norm(asking), values), 1)
            x = out(step.mix(number, _turn(rows, cos, sin), recipe)).add_(x)
            gate, up = gate_up(between(x)).view(-1, 2, middle).unbind(1)  # `split` takes twice as long
            return down(functional.silu(gate).mul_(up)).add_(x)

        return run


class FusedLayers(nn.Module):
    """The held layers of a skeleton, with its embedding and head where it has them."""

    def __init__(self, skeleton: Skeleton, make: Make) -> None:
        super().__init__()
        config = skeleton.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = skeleton.layers[0].self_attn
        self.shape = Shape(attention.q_proj.out_features // width, attention.k_proj.out_features // width, width)
        self.held = skeleton.held
        self.layers = nn.ModuleList(FusedLayer(layer, self.shape, make) for layer in skeleton.layers)
        self._embedding = skeleton.decoder.embed_tokens if skeleton.first else None
        self._norm = Norm.of(skeleton.decoder.norm) if skeleton.last else None
        self.head = _made(make, skeleton.model.get_output_embeddings()) if skeleton.last else None
        self._runs = [layer.bound() for layer in self.layers]
        self._angles = Angles(skeleton.decoder.rotary_emb, self.shape, skeleton.torch_dtype)

    def release(self, skeleton: Skeleton) -> None:
        """Let go of the weights that the modules no longer need."""
        for layer in skeleton.layers:
            for _, _, child in linears(layer):
                child.weight = nn.Parameter(child.weight.detach().to("meta"), requires_grad=False)

    def residual(self, layers: LayerRange, rows: torch.Tensor, layout: Layout) -> torch.Tensor:
        """``rows`` (ids or residuals) through ``layers``: the residual after them."""
        x = rows if rows.is_floating_point() or self._embedding is None else self._embedding(rows)
        cos, sin = self._angles.at(layout.positions()[0])
        step = UniformStep(layout, self.shape, x.dtype)
        first = layers.start - self.held.start
        for number, run in enumerate(self._runs[first : first + len(layers)]):
            x = run(x, number, step, cos, sin)
        return x

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and head of residual ``rows``."""
        if self.head is None or self._norm is None:
            raise LookupError("the head is not held here")
        return self.head(self._norm(rows))


class Norm:
    """The modules' RMS norm, rounding for rounding, with the mean and the epsilon in one operator (``mean`` is a sum and a
    division by a number that is made a tensor each time). It rounds before the weight, as that product is written (an operator
    of its own for it took 2.5 % of a step), and after it."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight.detach()
        self._epsilon = torch.tensor(epsilon)
        self._width = torch.tensor(float(weight.shape[-1]))

    @classmethod
    def of(cls, module: Any) -> Norm:
        """What transformers' ``module`` computes."""
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()  # once: each operator would convert for itself
        root = torch.addcdiv(self._epsilon, wide.square().sum(-1, True), self._width).rsqrt_()
        return torch.mul(wide, root, out=torch.empty_like(x)).mul_(self._weight)


class Angles:
    """Rotary cosines and sines of all positions met so far, as the architecture's own module computes them."""

    def __init__(self, rotary: Any, shape: Shape, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._shape = shape
        self._like = torch.zeros(1, dtype=dtype)
        self._table = torch.empty(0, 2, shape.width, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For every head of q, k and v ``[T, heads + 2 * groups, width]``: values turn by nothing. The sign of the swapped
        half is already in the sine."""
        longest = int(positions.max()) + 1
        if longest > len(self._table):
            self._grow(longest)
        shape = self._shape
        cos, sin = self._table.index_select(0, positions).unbind(1)
        turning = (-1, shape.heads + shape.groups, -1)
        still = torch.ones(len(positions), shape.groups, shape.width, dtype=cos.dtype)
        return (
            torch.cat((cos[:, None].expand(turning), still), 1),
            torch.cat((sin[:, None].expand(turning), torch.zeros_like(still)), 1),
        )

    def _grow(self, longest: int) -> None:
        end = -(-longest // _TABLE_STEP) * _TABLE_STEP
        cos, sin = self._rotary(self._like, torch.arange(len(self._table), end)[None])
        half = self._shape.width // 2
        sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        self._table = torch.cat((self._table, torch.stack((cos[0], sin), 1)))


def fits(skeleton: Skeleton) -> bool:
    """True if the skeleton's layers have the family's form and nothing beside it."""
    config = skeleton.config
    return (
        config.model_type in FAMILY
        and getattr(config, "hidden_act", None) == "silu"
        and getattr(config, "partial_rotary_factor", None) in (None, 1.0)
        and all(_has_form(layer) for layer in skeleton.layers)
    )


def _has_form(layer: Any) -> bool:
    names = {name for name, _ in layer.named_children()}
    attention = {name for name, _ in layer.self_attn.named_children()}
    mlp = {name for name, child in layer.mlp.named_children() if type(child) is nn.Linear}
    return (
        names == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and attention - {"q_norm", "k_norm"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and mlp == {"gate_proj", "up_proj", "down_proj"}
    )


def _made(make: Make, *parts: Any) -> nn.Module:
    """One linear of several that read the same rows, in the form that ``make`` gives it."""
    first = parts[0]
    whole = nn.Linear(1, 1, bias=False)
    whole.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
    whole.out_features, whole.in_features = whole.weight.shape
    if first.bias is not None:
        whole.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    made = make(whole)
    if made is None:
        raise NotImplementedError(f"no fast product for {whole.out_features}x{whole.in_features}")
    return made


def _head_norm(attention: Any, shape: Shape) -> Norm:
    """One norm over the heads of queries and keys, each with its own weight."""
    q, k = attention.q_norm, attention.k_norm
    if q.variance_epsilon != k.variance_epsilon:
        raise NotImplementedError("queries and keys are normed with different epsilons")
    weight = torch.cat((q.weight.detach().expand(shape.heads, -1), k.weight.detach().expand(shape.groups, -1)))
    return Norm(weight, q.variance_epsilon)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions; the sign of the swapped half is already in ``sin``."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))
