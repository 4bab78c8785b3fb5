"""Tiny random checkpoints of many architectures, written as their authors' files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

LAYERS = 4
VOCABULARY = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "vocab_size": VOCABULARY}
_MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)

# name -> (model type, settings on top of the common ones); only `None` settings are dropped
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3_rope_tied": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral_window": ("mistral", {"sliding_window": 12, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16, "layer_types": _MIXED}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16, "layer_types": _MIXED},
    ),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": _MIXED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": False}),
    "glm4": ("glm4", {"head_dim": 16}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "cohere2": ("cohere2", {"head_dim": 16, "sliding_window": 12, "layer_types": _MIXED}),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt_projected": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "exaone4": ("exaone4", {"sliding_window": 12, "layer_types": _MIXED}),
    "nemotron": ("nemotron", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 2.0}),
    "cohere": ("cohere", {}),
}

SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_layer": LAYERS, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": LAYERS}),
    "falcon": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 12}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}),
    "xglm": ("xglm", {"d_model": 64, "ffn_dim": 96, "attention_heads": 4, "num_layers": LAYERS}),
    "biogpt": ("biogpt", {}),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "attention_chunk_size": 12,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False}),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        },
    ),
}


def reference(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, *, noise: float = 0.05, seed: int = 0, **changes: Any
) -> Any:
    """Write the checkpoint ``name`` into ``folder`` and return the whole model. Without ``noise`` its weights are as new."""
    kind, settings = {**PACKED, **SINGLE}[name]
    config_class = CONFIG_MAPPING[kind]
    common = {} if settings is _GPT2 else _COMMON
    config = config_class(**{**common, **settings, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases, sinks and norms too: what is 0 or 1 hides mistakes
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model
