"""How a GGUF names and stores an architecture, and what the same model is called in a Hugging Face checkpoint.

Owns: metadata -> ``config.json``; tensor names; which projections llama.cpp stores with permuted rows. Knows nothing of
files, quantisation or tokenizers. Errors: ModelRefused naming the architecture or the key.

llama.cpp rotates adjacent pairs where transformers rotates halves, so its converter permutes the rows of ``attn_q`` and
``attn_k`` of architecture ``llama`` (and of no other here): see `Layout.permuted_heads`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshd.errors import ModelRefused

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_OUTER_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_NAMES: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

_LAYER = re.compile(r"blk\.([0-9]{1,4})\.(.+)\Z")


@dataclass(frozen=True, slots=True)
class Layout:
    """One GGUF's architecture, read from its metadata."""

    architecture: str
    config: Mapping[str, Any]

    def checkpoint_name(self, gguf_name: str) -> str:
        """The tensor's name in a Hugging Face checkpoint. Raises ModelRefused for one that this architecture lacks."""
        outer = _OUTER_NAMES.get(gguf_name)
        if outer is not None:
            return outer
        match = _LAYER.match(gguf_name)
        inner = _LAYER_NAMES.get(match[2]) if match else None
        if match is None or inner is None:
            raise ModelRefused(f"GGUF tensor {gguf_name!r} has no known place in architecture {self.architecture!r}")
        return f"model.layers.{int(match[1])}.{inner}"

    def permuted_heads(self, gguf_name: str) -> int | None:
        """The number of heads whose rows llama.cpp permuted in this tensor; None when it is stored as it was."""
        if self.architecture != "llama":
            return None
        match = _LAYER.match(gguf_name)
        part = match[2].partition(".")[0] if match else ""
        if part == "attn_q":
            return int(self.config["num_attention_heads"])
        if part == "attn_k":
            return int(self.config["num_key_value_heads"])
        return None


def read_layout(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """The layout of a GGUF from its metadata and its tensors' shapes (row-major, as numpy has them)."""
    architecture = str(metadata.get("general.architecture", ""))
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelRefused(
            f"GGUF architecture {architecture!r} cannot be converted (only {known}); "
            "pull the model's safetensors checkpoint instead"
        )
    keys = _Keys(architecture, metadata)
    _refuse_variants(keys, shapes)
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelRefused("GGUF tensor 'token_embd.weight' is missing or not a matrix")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    tied = "output.weight" not in shapes
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": keys.count("attention.key_length", hidden // heads),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": tied,
        "vocab_size": embedding[0],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
        config["mlp_bias"] = False
    for key, source in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = metadata.get(f"tokenizer.ggml.{source}_token_id")
        if value is not None:
            config[key] = int(value)
    return Layout(architecture, config)


class _Keys:
    """The architecture's own keys of the metadata, checked as they are read."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._prefix = architecture
        self._metadata = metadata

    def get(self, key: str) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelRefused(f"GGUF key '{self._prefix}.{key}' is {value!r}, a positive integer is wanted")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.get(key)
        return default if value is None else _shortest_float32(float(value))


def _refuse_variants(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Variants of a known architecture that would load and answer wrongly."""
    if keys.get("expert_count"):
        raise ModelRefused(
            "GGUF with experts (MoE) cannot be converted; pull the model's safetensors checkpoint instead"
        )
    scaling = keys.get("rope.scaling.type")
    if "rope_freqs.weight" in shapes or scaling not in (None, "none"):
        what = "tensor 'rope_freqs.weight'" if "rope_freqs.weight" in shapes else f"rope scaling {scaling!r}"
        raise ModelRefused(f"GGUF {what} cannot be converted; pull the model's safetensors checkpoint instead")


def _shortest_float32(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-05 as 9.999999747378752e-06."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == packed:
            return short
    return value
