"""The fused layers compute what the architecture's modules compute, and are chosen only where they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from meshd.inference.worker import fused, linears
from meshd.inference.worker.attention import Layout, Segment
from meshd.inference.worker.kv import PackedState
from meshd.inference.worker.skeleton import build
from meshd.inference.worker.stage import Stage
from meshd.inference.worker.uniform import Shape
from meshd.vocabulary import LayerRange
from tests.inference.stage.chain import Chain, some_ids, whole
from tests.inference.stage.checkpoints import VOCABULARY
from tests.inference.stage.conftest import Made

pytestmark = pytest.mark.torch

NAMES = ["llama", "llama3_rope_tied", "mistral_window", "qwen2", "qwen2_window", "qwen3"]
ALL = LayerRange(0, 4)


@pytest.mark.parametrize("name", NAMES)
def test_in_fp32_every_row_equals_the_whole_model(tiny: Made, name: str) -> None:
    """Chunks, row arithmetic and a second session in the batch, without the noise of bf16."""
    folder, model = tiny(name)
    skeleton = build(folder, ALL, "fp32")
    assert fused.fits(skeleton)
    ids, other = some_ids(46, VOCABULARY), some_ids(46, VOCABULARY, 2)
    states = [PackedState(ALL, logs=False), PackedState(ALL, logs=False)]
    with torch.inference_mode():
        layers = fused.FusedLayers(skeleton, _keep)
        parts: list[torch.Tensor] = []
        for start, end in ((0, 24), (24, 40), (40, 41), (41, 46)):
            n = end - start
            layout = Layout([Segment(states[i], start, n, 40, i * n) for i in range(2)])
            rows = torch.cat([ids[start:end], other[start:end]])
            parts.append(layers.logits(layers.residual(ALL, rows, layout)[:n]))
    torch.testing.assert_close(torch.cat(parts), whole(model, ids), atol=1e-5, rtol=0)


def _keep(linear: torch.nn.Linear) -> Any:
    kept = linears.BlockedLinear(linear)
    kept.nbytes = 0
    return kept


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_chosen_and_stays_near_the_modules(tiny: Made, name: str, dtype: str) -> None:
    folder, model = tiny(name, torch.bfloat16)
    chain = Chain.cut(folder, [0, 2, 4], dtype=dtype)
    for stage in chain.stages:
        assert stage._fused is not None
        assert stage.deterministic, stage.warnings
    ids = some_ids(46, VOCABULARY)
    got = chain.walk(chain.session(40), ids, [24, 16, 1, 5])
    error = (got - whole(model, ids)).norm() / whole(model, ids).norm()
    assert error < (0.02 if dtype == "bf16" else 0.05)


def test_norms_and_rotations_are_the_modules_to_the_bit(tiny: Made) -> None:
    folder, _ = tiny("qwen3", torch.bfloat16)
    skeleton = build(folder, ALL, "bf16")
    source = torch.Generator().manual_seed(3)
    rows = torch.randn(64, skeleton.hidden_size, generator=source).to(torch.bfloat16)
    positions = torch.arange(64)
    shape = Shape(heads=4, groups=2, width=32)
    heads = torch.randn(64, shape.heads + 2 * shape.groups, shape.width, generator=source).to(torch.bfloat16)
    with torch.inference_mode():
        norm = skeleton.layers[0].input_layernorm
        assert torch.equal(fused.Norm.of(norm)(rows), norm(rows))

        turned = fused._turn(heads, *fused.Angles(skeleton.decoder.rotary_emb, shape, torch.bfloat16).at(positions))
        cos, sin = skeleton.decoder.rotary_emb(rows, positions[None])
        asking = heads[:, : shape.heads + shape.groups]
        expected, _ = apply_rotary_pos_emb(asking[None], asking[None], cos, sin, unsqueeze_dim=2)
    assert torch.equal(turned, torch.cat([expected[0], heads[:, shape.heads + shape.groups :]], 1))


def test_a_part_of_what_is_held_gives_the_same_bits(tiny: Made) -> None:
    folder, _ = tiny("qwen3", torch.bfloat16)
    stage = Stage(folder, ALL)
    ids = some_ids(20, VOCABULARY)
    parts = Chain([stage] * 2, [LayerRange(0, 3), LayerRange(3, 4)])
    entire = Chain([stage])
    expected = entire.walk(entire.session(15), ids, [15, 5])
    assert torch.equal(parts.walk(parts.session(15), ids, [15, 1, 4]), expected)
    residual = stage.forward(LayerRange(0, 4), ids[:15])
    assert torch.equal(stage.lm_head(residual), expected[:15])
    assert torch.equal(stage.lm_head(residual[:1]), expected[:1])
    assert torch.equal(
        stage.forward(LayerRange(0, 2), stage.embed(ids[:15])), stage.forward(LayerRange(0, 2), ids[:15])
    )


@pytest.mark.parametrize("name", ["gemma", "phi", "granite", "qwen3_moe", "olmo2", "smollm3"])
def test_other_forms_are_left_to_the_modules(tiny: Made, name: str) -> None:
    folder, _ = tiny(name)
    assert not fused.fits(build(folder, ALL, "fp32"))


def test_layers_that_compute_something_else_are_found_out(tiny: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = tiny("llama", torch.bfloat16)
    monkeypatch.setattr(fused, "_turn", lambda x, _cos, _sin: x)
    stage = Stage(folder, ALL)
    assert stage._fused is None
    assert any("fused" in warning for warning in stage.warnings)
    ids = some_ids(30, VOCABULARY)
    chain = Chain([stage])
    got = chain.walk(chain.session(30), ids, [30])
    assert (got - whole(model, ids)).norm() / whole(model, ids).norm() < 0.02
