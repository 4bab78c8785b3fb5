"""Small checkpoints for tests: real files of real formats, with weights that are bytes of their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshd.models.checkpoint_writer import TensorPlan, write_safetensors

HIDDEN, VOCAB = 8, 32

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}

TOKENIZER: Mapping[str, Any] = {
    "version": "1.0",
    "added_tokens": [{"id": 2, "content": "<|im_end|>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 3, "<end>": 5}, "merges": []},
}


def plan(name: str, shape: tuple[int, ...], *, dtype: str = "BF16", data: bytes | None = None) -> TensorPlan:
    """A tensor of small finite bf16 values that depend on its name."""
    width = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "U8": 1}[dtype]
    size = width
    for length in shape:
        size *= length
    content = data if data is not None else (bytes([len(name) % 120, 0x3C]) * size)[:size]
    return TensorPlan(name, dtype, shape, size, lambda: content)


def llama_plans(num_layers: int = 4, *, tied: bool = False) -> list[TensorPlan]:
    plans = [plan("model.embed_tokens.weight", (VOCAB, HIDDEN))]
    for layer in range(num_layers):
        plans.append(plan(f"model.layers.{layer}.input_layernorm.weight", (HIDDEN,)))
        plans.append(plan(f"model.layers.{layer}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)))
    plans.append(plan("model.norm.weight", (HIDDEN,)))
    if not tied:
        plans.append(plan("lm_head.weight", (VOCAB, HIDDEN)))
    return plans


def write_model(
    folder: Path, plans: list[TensorPlan] | None = None, config: Mapping[str, Any] = CONFIG, *, files: int = 1
) -> Path:
    """A model folder: in one file, or spread over several with an index (without ``total_size``)."""
    folder.mkdir(parents=True, exist_ok=True)
    plans = plans if plans is not None else llama_plans()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    if files == 1:
        write_safetensors(folder / "model.safetensors", plans)
        return folder
    places: dict[str, str] = {}
    for number in range(files):
        part = plans[len(plans) * number // files : len(plans) * (number + 1) // files]
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        write_safetensors(folder / name, part)
        places.update({item.name: name for item in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
