"""Mixture-of-experts layers whose rows do not depend on their company.

transformers dispatches experts through an interface; its own implementations give one expert whatever rows came to it, one row
alone included, and one row takes another kernel, as do more than 32. Here every expert sees 2 to 32 rows at a time, and a row's
experts are added in the order of its own choice, as transformers' grouped products are, and rounded where those are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from meshd.inference.worker.linears import in_blocks

NAME: Final = "meshd_experts"
_MIN_ROWS: Final = 2
_MAX_ROWS: Final = 32  # beyond it the kernels sum in another order


def use_experts(model: Any) -> None:
    """Let every mixture-of-experts layer of ``model`` run through `experts`."""
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "config"):
            module.config._experts_implementation = NAME


def experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``hidden`` ``[n, H]``, ``chosen`` and ``weights`` ``[n, k]`` -> ``[n, H]``."""
    picks = chosen.shape[-1]
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    parts: torch.Tensor | None = None
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=module.num_experts).tolist()):
        if count == 0 or expert >= module.num_experts:
            continue
        places = order[start : start + count]
        start += count
        rows = hidden[places // picks]
        if count < _MIN_ROWS:
            rows = functional.pad(rows, (0, 0, 0, _MIN_ROWS - count))
        out = in_blocks(partial(_expert, module, expert), rows, _MAX_ROWS)[:count]
        if parts is None:
            parts = out.new_empty(len(flat), out.shape[-1])
        parts[places] = out
    if parts is None:
        return torch.zeros_like(hidden)
    weighted = parts.view(*chosen.shape, -1) * weights.view(*chosen.shape, 1)
    return weighted.sum(1).to(hidden.dtype)  # adds up in fp32 whatever the dtype


def _expert(module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    up = module.gate_up_proj if module.has_gate else module.up_proj
    up_bias = (
        (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert] if module.has_bias else None
    )
    middle = _product(rows, up[expert], up_bias, module.is_transposed)
    middle = module._apply_gate(middle) if module.has_gate else module.act_fn(middle)
    out = _product(
        middle,
        module.down_proj[expert],
        module.down_proj_bias[expert] if module.has_bias else None,
        module.is_transposed,
    )
    return module.post_expert_norm(out) if module.has_post_expert_norm else out


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    out = functional.linear(rows, weight.T if transposed else weight)
    return out if bias is None else out.add_(bias)  # grouped products know no bias: rounded before it


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
