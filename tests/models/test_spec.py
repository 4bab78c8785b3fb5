from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshd.errors import ModelRefused
from meshd.models.spec import open_folder, read_spec, tensors_of
from meshd.vocabulary import LayerRange, ModelSpec
from tests.models.checkpoints import CONFIG, HIDDEN, VOCAB, llama_plans, plan, write_model

TABLE_BYTES = VOCAB * HIDDEN * 2
LAYER_BYTES = (HIDDEN + HIDDEN * HIDDEN) * 2
NORM_BYTES = HIDDEN * 2


def spec_of(folder: Path) -> ModelSpec:
    return read_spec(open_folder(folder), "m", "d")


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_tensors(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path / "m", llama_plans(tied=tied), {**CONFIG, "tie_word_embeddings": tied})
    spec = spec_of(folder)
    assert spec.layer_bytes == (LAYER_BYTES,) * 4
    assert (spec.embed_bytes, spec.head_bytes, spec.tied) == (TABLE_BYTES, TABLE_BYTES + NORM_BYTES, tied)
    assert (spec.dtype, spec.hidden_size, spec.vocab_size, spec.context) == ("bf16", HIDDEN, VOCAB, 128)
    assert spec.kv_bytes_per_token_layer == 2 * 2 * 2 * 2  # keys and values, 2 heads of 2 values, 2 bytes
    for layers in (LayerRange(0, 4), LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 4)):
        assert spec.weight_bytes(layers) == sum(tensor.size_bytes for tensor in tensors_of(folder, layers))


def test_learned_positions_never_make_the_estimate_too_small(tmp_path: Path) -> None:
    plans = [
        plan("h.0.attn.weight", (8, 8)),
        plan("wte.weight", (32, 8)),
        plan("wpe.weight", (64, 8)),
        plan("ln_f.weight", (8,)),
    ]
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 64}
    folder = write_model(tmp_path / "m", plans, config)
    held = sum(tensor.size_bytes for tensor in tensors_of(folder, LayerRange(0, 1)))
    assert spec_of(folder).weight_bytes(LayerRange(0, 1)) == held


@pytest.mark.parametrize(
    ("change", "kv_bytes"),
    [
        ({"num_key_value_heads": None}, 2 * 4 * 2 * 2),
        ({"head_dim": 16}, 2 * 2 * 16 * 2),
        ({"num_key_value_heads": [1, 2, 4, 4]}, 2 * 4 * 2 * 2),
        ({"kv_lora_rank": 512, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 12}, 4 * (16 + 12) * 2),
    ],
)
def test_kv_is_bounded(tmp_path: Path, change: dict[str, Any], kv_bytes: int) -> None:
    assert spec_of(write_model(tmp_path / "m", config={**CONFIG, **change})).kv_bytes_per_token_layer == kv_bytes


def test_a_text_model_inside_a_multimodal_one(tmp_path: Path) -> None:
    outer = {
        "model_type": "gemma3",
        "text_config": dict(CONFIG),
        "vision_config": {"num_hidden_layers": 9},
        "eos_token_id": [1, 7],
    }
    spec = spec_of(write_model(tmp_path / "m", config=outer))
    assert spec.num_layers == 4
    assert spec.eos_ids == (0, 1, 2, 7)


def test_the_end_is_whatever_any_file_calls_the_end(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert spec_of(folder).eos_ids == (0, 2)  # config says 0, the tokenizer's own <|im_end|> is 2
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 99999]}))
    assert spec_of(folder).eos_ids == (0, 2, 4)  # ids outside the vocabulary end nothing
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert spec_of(folder).eos_ids == (0, 4, 5)
    table = {"6": {"content": "<end>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "added_tokens_decoder": table}))
    assert spec_of(folder).eos_ids == (0, 4, 6)
    (folder / "tokenizer_config.json").unlink()
    assert spec_of(folder).eos_ids == (0, 4)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert spec_of(folder).eos_ids == (0, 4, 5)
    (folder / "tokenizer.json").unlink()
    assert spec_of(folder).eos_ids == (0, 4)


def test_the_beginning_comes_from_config_or_tokenizer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert spec_of(folder).bos_id is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_end|>"}))
    assert spec_of(folder).bos_id == 2
    write_model(tmp_path / "n", config={**CONFIG, "bos_token_id": 1})
    assert spec_of(tmp_path / "n").bos_id == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers"),
        ({"num_hidden_layers": 5}, "layer 4"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = write_model(tmp_path / "m", config={**CONFIG, **change})
    with pytest.raises(ModelRefused, match=said):
        spec_of(folder)


def test_packed_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [*llama_plans(), plan("model.layers.0.w.weight", (4, 4), dtype="U8")])
    with pytest.raises(ModelRefused, match=r"model\.layers\.0\.w\.weight"):
        spec_of(folder)


def test_a_missing_file_leaves_the_rest_usable(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", files=4)
    (folder / "model-00003-of-00004.safetensors").unlink()
    spec = spec_of(folder)
    assert spec.layer_bytes == (LAYER_BYTES,) * 4
    assert tensors_of(folder, LayerRange(0, 2))
    assert open_folder(folder).held() == (LayerRange(0, 2),)
    assert open_folder(write_model(tmp_path / "whole")).held() == (LayerRange(0, 4),)
    with pytest.raises(ModelRefused, match=r"model-00003-of-00004\.safetensors is missing"):
        tensors_of(folder, LayerRange(2, 4))


def test_a_folder_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"config\.json is missing"):
        open_folder(tmp_path)
