"""The SentencePiece-style tokenizer of a GGUF (llama.cpp's model ``llama``) as a BPE of the ``tokenizers`` library.

Owns the recovery of merges: SentencePiece stores scores, the library wants an order of merges. Every way to split a piece into
two others is a merge, and the better its score the earlier it goes; this is what transformers does with the same files. Pure;
returns JSON values. Errors: ModelRefused naming the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshd.errors import ModelRefused

Json = dict[str, Any]

_SPACE: Final = "\u2581"  # how SentencePiece writes a space


def sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Json:
    """``normalizer``, ``pre_tokenizer``, ``decoder`` and ``model`` of a tokenizer.json."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelRefused("GGUF key 'tokenizer.ggml.scores' is missing or has another length than the tokens")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise ModelRefused(f"GGUF key 'tokenizer.ggml.unknown_token_id' is {unknown!r}, outside the vocabulary")
    replace: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restore: Json = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    prepend: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": _merges(tokens, [float(score) for score in scores]),
        },
    }


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, list[str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        inside = sorted(
            (pair for pair in pairs if pair[0] in ids and pair[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]])
        )
        found += [(score, len(left), len(right), [left, right]) for left, right in inside]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3] for merge in found]
