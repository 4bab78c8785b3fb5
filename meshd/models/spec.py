"""Builds a `ModelSpec` from a model folder: ``config.json`` and tensor headers, never the weights.

Owns the many spellings of the same few numbers in configs, and the rule for where an answer ends: the union of what config,
generation config and tokenizer config call the end, because each of them alone has been wrong in published checkpoints.
Standard library only: the daemon uses it. Sizes are bytes of the checkpoint's own dtype. Errors: ModelRefused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any, Final

from meshd.errors import ModelRefused
from meshd.models.anatomy import Anatomy, dissect
from meshd.models.disk import disk_errors
from meshd.models.headers import (
    JSON_CAP_BYTES,
    Checkpoint,
    TensorInfo,
    parse_json_untrusted,
    read_capped,
    read_checkpoint,
)
from meshd.vocabulary import LayerRange, ModelSpec

DTYPE_NAMES: Final[Mapping[str, str]] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
VALUE_BYTES: Final[Mapping[str, int]] = {"bf16": 2, "fp16": 2, "fp32": 4}
DEFAULT_CONTEXT: Final = 2048  # configs without one (BLOOM) were trained on this much

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS: Final = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_DIM: Final = ("head_dim", "kv_channels", "attention_head_dim", "global_head_dim", "swa_head_dim")
_CONTEXT: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model as it lies on disk: config, headers, and which tensor goes where."""

    path: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint
    anatomy: Anatomy

    def tensors_of(self, layers: LayerRange) -> tuple[TensorInfo, ...]:
        """What must be held to serve ``layers``. ModelRefused names a missing file and the layers it holds."""
        return self.checkpoint.need(self.anatomy.names(layers))

    def held(self) -> tuple[LayerRange, ...]:
        """The widest ranges whose tensors are all here (their ends included): what this folder can serve."""
        count, tensors = len(self.anatomy.layers), self.checkpoint.tensors
        here = [all(n in tensors for n in self.anatomy.names(LayerRange(i, i + 1))) for i in range(count)]
        starts = [i for i in range(count) if here[i] and not (i and here[i - 1])]
        ends = [i + 1 for i in range(count) if here[i] and not (i + 1 < count and here[i + 1])]
        return tuple(LayerRange(start, end) for start, end in zip(starts, ends, strict=True))


def open_folder(path: Path) -> ModelFolder:
    """Read a model folder's config and headers. Refuses what would need foreign code or cannot be cut."""
    config = parse_json_untrusted(read_capped(path / "config.json", JSON_CAP_BYTES), "config.json")
    refuse_unsafe(config)
    text = text_config(config)
    checkpoint = read_checkpoint(path)
    anatomy = dissect(checkpoint.names, _number(text, _LAYERS, cap=100_000), _tie(config, text))
    return ModelFolder(path, config, checkpoint, anatomy)


def tensors_of(path: Path, layers: LayerRange) -> tuple[TensorInfo, ...]:
    """`ModelFolder.tensors_of` of the folder at ``path``, for a node's loader: a disk's refusal is a StateError."""
    with disk_errors(path):
        return open_folder(path).tensors_of(layers)


def read_spec(folder: ModelFolder, name: str, digest: str) -> ModelSpec:
    """The spec of a folder. Layers whose file is missing count like the median of the others."""
    text = text_config(folder.config)
    hidden = _number(text, _HIDDEN)
    tensors, anatomy = folder.checkpoint.tensors, folder.anatomy
    dtype = _dtype(folder.checkpoint)
    table = tensors.get(anatomy.table)
    if table is not None and len(table.shape) != 2:
        raise ModelRefused(f"{table.file}: {table.name!r} has shape {list(table.shape)}, a matrix is wanted")
    vocab = table.shape[0] if table is not None else _number(text, ("vocab_size",))
    embed = _bytes(folder, anatomy.first)
    tail = _bytes(folder, tuple(name for name in anatomy.last if name != anatomy.table or not anatomy.tied))
    known = [_bytes(folder, layer) for layer in anatomy.layers]
    middle = median_low([size for size in known if size is not None] or [0])
    table_bytes = vocab * hidden * VALUE_BYTES[dtype]
    embed_bytes = table_bytes if embed is None else embed
    tail_bytes = table_bytes if tail is None else tail
    ends = end_ids(folder.path, folder.config)
    return ModelSpec(
        name=name,
        digest=digest,
        dtype=dtype,
        num_layers=len(anatomy.layers),
        hidden_size=hidden,
        vocab_size=vocab,
        layer_bytes=tuple(middle if size is None else size for size in known),
        embed_bytes=embed_bytes,
        # A tied head counts as all of `embed_bytes`, positions included: a node with both ends subtracts exactly that again.
        head_bytes=tail_bytes + (embed_bytes if anatomy.tied else 0),
        tied=anatomy.tied,
        kv_bytes_per_token_layer=_kv_values(text, hidden) * VALUE_BYTES[dtype],
        context=_number(text, _CONTEXT, default=DEFAULT_CONTEXT),
        eos_ids=tuple(sorted(token for token in ends.eos if 0 <= token < vocab)),
        bos_id=ends.bos if ends.bos is not None and 0 <= ends.bos < vocab else None,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: nested in multimodal ones."""
    for key in _TEXT_PARTS:
        part = config.get(key)
        if isinstance(part, dict):
            return text_config(part) if any(inner in part for inner in _TEXT_PARTS) else part
    return config


def refuse_unsafe(config: Mapping[str, Any]) -> None:
    """Refuse a config that asks for code of its own, for another kind of model, or for weights that are not numbers."""
    for part in (config, text_config(config)):
        if part.get("auto_map"):
            raise ModelRefused("config.json has auto_map: the model wants code from its repository, which is never run")
        if part.get("is_encoder_decoder") is True:
            raise ModelRefused("config.json describes an encoder-decoder; only causal language models can be cut")
        quantised = part.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ModelRefused(
                f"config.json says the weights are quantised ({method}); take the bf16 checkpoint and @int8"
            )


@dataclass(frozen=True, slots=True)
class EndIds:
    """Token ids that end an answer, and the one that begins a text."""

    eos: frozenset[int]
    bos: int | None


def end_ids(path: Path, config: Mapping[str, Any]) -> EndIds:
    """The union over config, text config, generation config and tokenizer config, or its older companion."""
    parts = [config, text_config(config), _optional(path / "generation_config.json")]
    eos = {token for part in parts for token in _ids(part.get("eos_token_id"))}
    begins = [token for part in parts for token in _ids(part.get("bos_token_id"))]
    tokenizer, older = (_optional(path / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))

    def named(key: str) -> list[int]:
        texts = _token_texts(tokenizer.get(key)) or _token_texts(older.get(key))
        return [token for text in texts for token in _token_id(path, tokenizer, text)]

    eos.update(named("eos_token"))
    if not begins:
        begins = named("bos_token")
    return EndIds(frozenset(eos), begins[0] if begins else None)


def _token_texts(value: Any) -> list[str]:
    """A special token is spelled as text, or as an object with the text in ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return [text] if isinstance(text, str) and text else []


def _token_id(path: Path, tokenizer: Mapping[str, Any], text: str) -> list[int]:
    """The id of a token's text: from the tokenizer config's table, else from the (large) tokenizer file."""
    table = tokenizer.get("added_tokens_decoder")
    if isinstance(table, dict):
        for key, entry in table.items():
            if isinstance(entry, dict) and entry.get("content") == text and key.isascii() and key.isdigit():
                return [int(key)]
    whole = _optional(path / "tokenizer.json")
    added = whole.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == text:
            return _ids(entry.get("id"))
    model = whole.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return _ids(vocab.get(text)) if isinstance(vocab, dict) else []


def _optional(path: Path) -> dict[str, Any]:
    return parse_json_untrusted(read_capped(path, JSON_CAP_BYTES), path.name) if path.is_file() else {}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]


def _number(config: Mapping[str, Any], keys: tuple[str, ...], *, default: int | None = None, cap: int = 1 << 40) -> int:
    for key in keys:
        value = config.get(key)
        value = max(value) if isinstance(value, list) and value and all(type(v) is int for v in value) else value
        if type(value) is int and 0 < value <= cap:
            return value
    if default is None:
        raise ModelRefused(f"config.json has no usable {keys[0]}: {config.get(keys[0])!r}")
    return default


def _kv_values(text: Mapping[str, Any], hidden: int) -> int:
    """Values of KV per token and layer: an upper bound where layers differ or keys are compressed (MLA is kept expanded)."""
    heads = _number(text, _HEADS, default=1)
    if type(text.get("kv_lora_rank")) is int:
        keys = _number(text, ("qk_nope_head_dim",), default=0) + _number(text, ("qk_rope_head_dim",), default=0)
        return heads * (keys + _number(text, ("v_head_dim",), default=keys))
    dims = [_number(text, (key,), default=0) for key in _HEAD_DIM]
    head_dim = max(dims) or -(-hidden // heads)
    return 2 * _number(text, _KV_HEADS, default=heads) * head_dim


def _tie(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool | None:
    said = [part.get("tie_word_embeddings") for part in (config, text)]
    if True in said:
        return True
    return False if False in said else None


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype of most bytes. A matrix in anything else than plain floats cannot be run."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype not in DTYPE_NAMES and len(tensor.shape) >= 2 and tensor.dtype.startswith(("F", "U8", "I8")):
            raise ModelRefused(
                f"{tensor.file}: {tensor.name!r} is {tensor.dtype}; only {', '.join(DTYPE_NAMES)} are run"
            )
        if tensor.dtype in DTYPE_NAMES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size_bytes
    if not sizes:
        raise ModelRefused(f"{checkpoint.folder} holds no tensor of {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[max(sizes, key=lambda dtype: (sizes[dtype], dtype))]


def _bytes(folder: ModelFolder, names: tuple[str, ...]) -> int | None:
    """Bytes of the tensors; None when one of them is in a missing file."""
    tensors = folder.checkpoint.tensors
    return sum(tensors[name].size_bytes for name in names) if all(name in tensors for name in names) else None
