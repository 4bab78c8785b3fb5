from __future__ import annotations

import pytest

from meshd.errors import ModelRefused
from meshd.models.anatomy import dissect
from meshd.vocabulary import LayerRange


def names(prefix: str, count: int, *inner: str) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(count) for part in inner or ("attn.weight",)]


@pytest.mark.parametrize(
    ("layers", "first", "last", "tied"),
    [
        ("model.layers", "model.embed_tokens", "model.norm lm_head", False),
        ("model.layers", "model.embed_tokens", "model.norm", True),
        ("transformer.h", "transformer.wte transformer.wpe", "transformer.ln_f", True),
        ("h", "wte wpe", "ln_f", True),
        ("gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm embed_out", False),
        ("decoder.layers", "decoder.embed_tokens decoder.embed_positions", "decoder.final_layer_norm", True),
        ("backbone.layers", "backbone.embeddings", "backbone.norm_f", True),
        ("lm.model.layers", "lm.model.embed_tokens", "lm.model.norm lm.lm_head", False),
        ("model.lm.layers", "model.lm.embed_tokens", "model.lm.norm lm_head", False),
    ],
)
def test_families_are_cut_by_their_numbering(layers: str, first: str, last: str, tied: bool) -> None:
    heads, tails = ([f"{name}.weight" for name in text.split()] for text in (first, last))
    vision = [*names("vision_tower.layers", 4), "vision_tower.embeddings.patch.weight", "multi_modal_projector.w"]
    found = dissect([*names(layers, 4), *heads, *tails, *vision], 4, None)
    assert found.layers[2] == (f"{layers}.2.attn.weight",)
    assert set(found.first) == set(heads)
    assert set(found.last) == {*tails, *([found.table] if tied else [])}
    assert found.table == heads[0]
    assert found.tied is tied


def test_a_norm_of_the_embedding_is_held_at_both_ends() -> None:
    found = dissect([*names("model.layers", 2), "model.embed_tokens.weight", "model.embedding_norm.weight"], 2, True)
    assert "model.embedding_norm.weight" in found.first
    assert "model.embedding_norm.weight" in found.last


def test_a_vision_tower_with_more_layers_is_not_the_language_model() -> None:
    vision = names("visual.blocks", 32, "a.weight", "b.weight", "c.weight")
    found = dissect([*names("model.layers", 4), *vision, "model.embed_tokens.weight", "model.norm.weight"], 4, True)
    assert found.layers[0] == ("model.layers.0.attn.weight",)
    assert not any("visual" in name for name in found.names(LayerRange(0, 4)))


def test_experts_stay_inside_their_layer_and_draft_layers_are_left_out() -> None:
    experts = names("model.layers.1.mlp.experts", 8)
    draft = ["model.layers.3.eh_proj.weight"]
    found = dissect([*names("model.layers", 3), *experts, *draft, "model.embed_tokens.weight"], 3, None)
    assert set(experts) < set(found.layers[1])
    assert len(found.layers) == 3
    assert draft[0] not in found.names(LayerRange(0, 3))


def test_a_tied_head_may_have_a_bias_of_its_own() -> None:
    found = dissect([*names("model.layers", 2), "model.embed_tokens.weight", "lm_head.bias"], 2, True)
    assert found.tied
    assert found.last == ("model.embed_tokens.weight", "lm_head.bias")


def test_a_head_in_the_file_is_the_head_even_if_the_config_says_that_it_is_tied() -> None:
    head = ("lm_head.bias", "lm_head.weight")
    found = dissect([*names("model.layers", 2), "model.embed_tokens.weight", *head], 2, True)
    assert not found.tied
    assert found.last == head


def test_an_untied_head_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelRefused, match="not tied"):
        dissect([*names("model.layers", 2), "model.embed_tokens.weight"], 2, False)


def test_a_layer_without_tensors_is_refused_by_its_number() -> None:
    with pytest.raises(ModelRefused, match="layer 2"):
        dissect([*names("model.layers", 2), "model.layers.3.w", "model.embed_tokens.weight"], 4, None)


def test_no_layers_and_no_embedding_are_refused() -> None:
    with pytest.raises(ModelRefused, match="names a layer"):
        dissect(["a.weight", "b.weight"], 2, None)
    with pytest.raises(ModelRefused, match="embedding"):
        dissect(names("model.layers", 2), 2, None)


def test_names_of_a_range_are_what_the_stage_needs_and_nothing_twice() -> None:
    found = dissect([*names("model.layers", 4), "model.embed_tokens.weight", "model.norm.weight"], 4, True)
    assert found.names(LayerRange(1, 3)) == ["model.layers.1.attn.weight", "model.layers.2.attn.weight"]
    assert found.names(LayerRange(3, 4))[1:] == ["model.norm.weight", "model.embed_tokens.weight"]
    whole = found.names(LayerRange(0, 4))
    assert len(whole) == len(set(whole)) == 6
    with pytest.raises(ModelRefused):
        found.names(LayerRange(3, 5))
