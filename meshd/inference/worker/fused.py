"""Llama's family of layers with fewer and larger products: one for q, k and v, one for gate and up.

For decoders of the form norm, attention, add, norm, gated SiLU, add: Llama, Mistral, Qwen2, Qwen3 (which also norms queries and
keys). Computes what transformers' modules compute, in about a third of the operators; the weights are private copies, so this
runs only where linears are copied anyway (prepacked or int8). Attention and KV are those of `attention` and `kv`; the
arithmetic is another one than the modules' (norms and rotations round once less), and so has another name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from meshd.inference.worker.attention import Layout, Recipe, serve
from meshd.inference.worker.linears import linears
from meshd.inference.worker.skeleton import Skeleton
from meshd.vocabulary import LayerRange

FAMILY: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})

Make = Callable[[nn.Linear], nn.Module | None]


class FusedLayer(nn.Module):
    """One decoder layer. The two fused products stand beside the layer's own o and down projections."""

    def __init__(self, layer: Any, head_dim: int, make: Make) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim = head_dim
        self.heads = attention.q_proj.out_features // head_dim
        self.groups = attention.k_proj.out_features // head_dim
        self.middle = mlp.gate_proj.out_features
        self.qkv = _made(make, attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _made(make, attention.o_proj)
        self.gate_up = _made(make, mlp.gate_proj, mlp.up_proj)
        self.down = _made(make, mlp.down_proj)
        self.norms = [layer.input_layernorm, layer.post_attention_layernorm]
        self.head_norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        window = getattr(attention, "sliding_window", None)
        if not hasattr(attention, "sliding_window") and attention.config.model_type == "mistral":
            window = attention.config.sliding_window  # Mistral's layers ask their config at each step
        self.recipe = Recipe(attention.scaling, window=window)

    def forward(
        self, x: torch.Tensor, number: int, layout: Layout, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """``x`` ``[T, hidden]`` through the layer; ``number`` is where the sessions keep its KV."""
        rows = len(x)
        turned = self.heads + self.groups
        qkv = self.qkv(_norm(x, self.norms[0])).view(rows, turned + self.groups, self.head_dim)
        queries_keys = qkv[:, :turned]
        if self.head_norms:
            parts = queries_keys.split([self.heads, self.groups], 1)
            queries_keys = torch.cat([_norm(part, norm) for part, norm in zip(parts, self.head_norms, strict=True)], 1)
        turned_rows = _turn(queries_keys, cos, sin)
        both = torch.stack((turned_rows[:, self.heads :], qkv[:, turned:])).transpose(1, 2)
        for s in layout.segments:
            s.state.put_both(number, s.start, both[:, :, s.offset : s.offset + s.n])
        mixed = x.new_empty(rows, self.heads, self.head_dim)
        serve(layout, number, turned_rows[:, : self.heads], mixed, self.recipe)
        x = x + self.out(mixed.view(rows, -1))
        gate, up = self.gate_up(_norm(x, self.norms[1])).split(self.middle, 1)
        return x + self.down(functional.silu(gate) * up)


class FusedLayers(nn.Module):
    """The held layers of a skeleton, with its embedding and head where it has them."""

    def __init__(self, skeleton: Skeleton, make: Make) -> None:
        super().__init__()
        config = skeleton.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.held = skeleton.held
        self.layers = nn.ModuleList(FusedLayer(layer, head_dim, make) for layer in skeleton.layers)
        self._rotary = skeleton.decoder.rotary_emb
        self._embedding = skeleton.decoder.embed_tokens if skeleton.first else None
        self._norm = skeleton.decoder.norm if skeleton.last else None
        self.head = _made(make, skeleton.model.get_output_embeddings()) if skeleton.last else None

    def release(self, skeleton: Skeleton) -> None:
        """Let go of the weights that the modules no longer need."""
        for layer in skeleton.layers:
            for _, _, child in linears(layer):
                child.weight = nn.Parameter(child.weight.detach().to("meta"), requires_grad=False)

    def residual(self, layers: LayerRange, rows: torch.Tensor, layout: Layout) -> torch.Tensor:
        """``rows`` (ids or residuals) through ``layers``: the residual after them."""
        x = rows if rows.is_floating_point() or self._embedding is None else self._embedding(rows)
        cos, sin = self._rotary(x, layout.positions())
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]
        cos = cos[0][:, None]
        for number in range(len(layers)):
            x = self.layers[layers.start - self.held.start + number](x, number, layout, cos, sin)
        return x

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and head of residual ``rows``."""
        if self.head is None:
            raise LookupError("the head is not held here")
        return self.head(_norm(rows, self._norm))


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


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions; the sign of the swapped half is already in ``sin``."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), -1), sin)
