"""Rebuilds ``tokenizer.json`` and ``tokenizer_config.json`` from a GGUF's metadata.

Owns the mapping from llama.cpp's tokenizer models and pre-tokenizer names to the pipeline of the ``tokenizers`` library; writes
plain JSON values and imports nothing of it. A pre-tokenizer that is not known is refused: a close one would give other
ids for some prompts, which no checksum would notice. Errors: ModelRefused naming the key.

Sources: llama.cpp ``src/llama-vocab.cpp`` (regular expressions by name), transformers ``convert_slow_tokenizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from meshd.errors import ModelRefused
from meshd.models.gguf_sentencepiece import sentencepiece_bpe

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # llama.cpp's token types

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_DIGITS: Final[Json] = {"type": "Digits", "individual_digits": True}

_PRE_TOKENIZERS: Final[Mapping[str, Json]] = {
    "smollm": _sequence(_DIGITS, _byte_level(True)),
    "gpt-2": _byte_level(True),
    "qwen2": _sequence(_split(_CONTRACTIONS + r"\p{N}" + _REST), _byte_level(False)),
    "llama-bpe": _sequence(_split(_CONTRACTIONS + r"\p{N}{1,3}" + _REST), _byte_level(False)),
}


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[Json, Json] | None:
    """``(tokenizer.json, tokenizer_config.json)`` of a GGUF; None for one that has no tokenizer."""
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)]
    if len(types) != len(tokens):
        raise ModelRefused(f"GGUF key 'tokenizer.ggml.token_type' has {len(types)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise ModelRefused("GGUF key 'tokenizer.ggml.tokens' names a token twice")
    steps = _STEPS.get(str(model))
    if steps is None:
        raise ModelRefused(
            f"GGUF tokenizer {model!r} cannot be converted (only {', '.join(sorted(_STEPS))}); "
            "pull the model's safetensors checkpoint instead"
        )
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama"))
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    pipeline: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, tokens[index], special=kind != _USER_DEFINED)
            for index, kind in enumerate(types)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        **steps(metadata, tokens),
        "post_processor": _bos_template(tokens, bos_id) if adds_bos and bos_id is not None else None,
    }
    return pipeline, _tokenizer_config(metadata, tokens, adds_bos=adds_bos)


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Json:
    name = metadata.get("tokenizer.ggml.pre")
    pre_tokenizer = _PRE_TOKENIZERS.get(str(name))
    if pre_tokenizer is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelRefused(f"GGUF pre-tokenizer {name!r} cannot be converted (only {known})")
    merges = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ModelRefused("GGUF key 'tokenizer.ggml.merges' has an entry that is not a pair")
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


_STEPS: Final[Mapping[str, Callable[[Mapping[str, Any], Sequence[str]], Json]]] = {
    "gpt2": _byte_level_bpe,
    "llama": sentencepiece_bpe,
}
"""llama.cpp's tokenizer model -> the pipeline without its ends."""


def _added_token(index: int, text: str, *, special: bool) -> Json:
    return {
        "id": index,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _bos_template(tokens: Sequence[str], bos_id: int) -> Json:
    bos = tokens[bos_id]
    first: Json = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _tokenizer_config(metadata: Mapping[str, Any], tokens: Sequence[str], *, adds_bos: bool) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "clean_up_tokenization_spaces": False,
    }
    for key, source in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{source}_token_id")
        if index is None:
            continue
        if not 0 <= int(index) < len(tokens):
            raise ModelRefused(f"GGUF key 'tokenizer.ggml.{source}_token_id' is {index}, outside the vocabulary")
        config[f"{key}_token"] = tokens[int(index)]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelRefused(f"GGUF key {key!r} is missing or not a list of strings")
    return value
