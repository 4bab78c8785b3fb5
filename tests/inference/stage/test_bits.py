"""In bf16 our experts and sinks round where transformers' own do: near-ties fall as they do there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from meshd.inference.worker import attention, experts
from meshd.inference.worker.attention import Recipe
from tests.inference.stage.conftest import Made

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_the_grouped_products_of_transformers(tiny: Made, name: str) -> None:
    _, model = tiny(name, torch.bfloat16)
    module = next(m for m in model.modules() if hasattr(m, "has_gate") and hasattr(m, "num_experts"))
    source = torch.Generator().manual_seed(9)
    hidden = torch.randn(12, 64, generator=source).to(torch.bfloat16)
    weights = torch.rand(12, 2, generator=source).to(torch.bfloat16)
    chosen = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2]]).repeat(3, 1)
    with torch.inference_mode():
        expected = grouped_mm_experts_forward(module, hidden, chosen, weights)
        got = experts.experts(module, hidden, chosen, weights)
    assert torch.equal(got, expected)


def test_sinks_are_weighed_as_by_transformers(tiny: Made) -> None:
    _, model = tiny("gpt_oss", torch.bfloat16)
    module: Any = next(m for m in model.modules() if hasattr(m, "sinks"))
    source = torch.Generator().manual_seed(9)
    query = torch.randn(1, 4, 8, 16, generator=source).to(torch.bfloat16)
    keys, values = (torch.randn(1, 2, 8, 16, generator=source).to(torch.bfloat16) for _ in range(2))
    mask = torch.full((8, 8), -torch.inf, dtype=torch.bfloat16).triu(1)
    with torch.inference_mode():
        expected, _ = eager_attention_forward(module, query, keys, values, mask, scaling=0.25)
        got = attention._explicit(
            query[0].transpose(0, 1), keys[0], values[0], mask, Recipe(0.25, sinks=module.sinks.detach())
        )
    assert torch.equal(got, expected[0])
