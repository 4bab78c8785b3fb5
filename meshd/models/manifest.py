"""What a stored model consists of, and the digest that two nodes compare before they work together.

Owns the manifest (``meshd-manifest.json`` in the model's folder) and the identity made of it. The digest is a hash over the
canonical config, the tokenizer's files, and name, dtype, shape and SHA-256 of every tensor: how tensors are spread over files
does not change it, one changed weight does. A dtype that is not the file's (``@int8``) is another identity. Pure.

Errors: ModelRefused for a manifest that cannot be read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from meshd.errors import ModelRefused
from meshd.models.headers import JSON_CAP_BYTES, is_plain_file_name, parse_json_untrusted, read_capped
from meshd.vocabulary import ModelSpec

MANIFEST_FILE: Final = "meshd-manifest.json"
FORMAT: Final = 1
DIGEST_CHARS: Final = 32  # 128 bits: adverts carry it

TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt"),
)

DTYPES: Final = ("bf16", "fp16", "fp32", "int8")

_UNHASHED_CONFIG: Final = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype"})


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a manifest. ``sha256`` is empty for a tensor whose file was missing when the model was stored."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of a stored model. ``spec.name`` is the name it was pulled under."""

    spec: ModelSpec
    source: str
    config_sha256: str
    tokenizer_sha256: str
    tensors: Mapping[str, TensorRecord]

    @property
    def missing_files(self) -> tuple[str, ...]:
        """Files that were not there when the model was stored: their layers cannot be served from here."""
        return tuple(sorted({record.file for record in self.tensors.values() if not record.sha256}))


def config_sha256(config: Mapping[str, Any]) -> str:
    """The hash of a config, whatever its layout and the tool that wrote it."""
    kept = {key: value for key, value in config.items() if key not in _UNHASHED_CONFIG}
    return hashlib.sha256(_canonical(kept)).hexdigest()


def tokenizer_sha256(folder: Path) -> str:
    """The hash of everything that turns text into ids and back, the chat template included."""
    total = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            content = hashlib.sha256(read_capped(folder / name, JSON_CAP_BYTES)).hexdigest()
            total.update(f"{name} {content}\n".encode())
    return total.hexdigest()


def digest_of(config: str, tokenizer: str, tensors: Mapping[str, TensorRecord], dtype: str) -> str:
    """The model's identity, from the hashes of its parts."""
    total = hashlib.sha256(f"meshd model 1\n{config}\n{tokenizer}\n{dtype}\n".encode())
    for name in sorted(tensors):
        record = tensors[name]
        total.update(_canonical([name, record.dtype, list(record.shape), record.sha256]))
    return total.hexdigest()[:DIGEST_CHARS]


def as_dtype(spec: ModelSpec, dtype: str) -> ModelSpec:
    """The same model computed in another dtype: other name (``@int8``), other digest, other sizes.

    int8 rows carry a scale each and KV stays as it was; the embedding is only looked up and stays too.
    """
    if dtype not in DTYPES:
        raise ModelRefused(f"{dtype!r} is not a dtype; there are {', '.join(DTYPES)}")
    if dtype == spec.dtype:
        return spec
    name = f"{spec.name}@{dtype}"
    digest = hashlib.sha256(f"{spec.digest}@{dtype}".encode()).hexdigest()[:DIGEST_CHARS]
    if dtype == "int8":
        halves = 4 if spec.dtype == "fp32" else 2
        layers = tuple(-(-size // halves) + size // 64 for size in spec.layer_bytes)
        return replace(spec, name=name, digest=digest, dtype=dtype, layer_bytes=layers)
    width = {"bf16": 2, "fp16": 2, "fp32": 4}
    up, down = width[dtype], width[spec.dtype]

    def scaled(size: int) -> int:
        return -(-size * up // down)

    return replace(
        spec,
        name=name,
        digest=digest,
        dtype=dtype,
        layer_bytes=tuple(scaled(size) for size in spec.layer_bytes),
        embed_bytes=scaled(spec.embed_bytes),
        head_bytes=scaled(spec.head_bytes),
        kv_bytes_per_token_layer=scaled(spec.kv_bytes_per_token_layer),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder that is not installed yet."""
    document = {"format": FORMAT, **asdict(manifest)}
    (folder / MANIFEST_FILE).write_bytes(json.dumps(document, indent=1, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a model folder. It is as much a file from elsewhere as the rest of the folder: checked."""
    return parse_manifest_untrusted(read_capped(folder / MANIFEST_FILE, JSON_CAP_BYTES))


def parse_manifest_untrusted(text: bytes) -> Manifest:
    """A manifest from a file or a peer. Raises only ModelRefused."""
    document = parse_json_untrusted(text, MANIFEST_FILE)
    if document.get("format") != FORMAT:
        raise ModelRefused(f"{MANIFEST_FILE} has format {document.get('format')!r}, this version reads {FORMAT}")
    try:
        manifest = Manifest(
            spec=_spec(document["spec"]),
            source=_text(document["source"]),
            config_sha256=_text(document["config_sha256"]),
            tokenizer_sha256=_text(document["tokenizer_sha256"]),
            tensors={name: _record(name, entry) for name, entry in document["tensors"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelRefused(f"{MANIFEST_FILE} is damaged: {error!r}") from error
    found = digest_of(manifest.config_sha256, manifest.tokenizer_sha256, manifest.tensors, manifest.spec.dtype)
    if found != manifest.spec.digest:
        raise ModelRefused(f"{MANIFEST_FILE} is damaged: its digest is not that of its tensors")
    return manifest


def _spec(value: Mapping[str, Any]) -> ModelSpec:
    known = {field.name for field in fields(ModelSpec)}
    if set(value) != known:
        raise ValueError(f"spec has other fields: {sorted(known.symmetric_difference(value))}")
    naturals = (
        "num_layers",
        "hidden_size",
        "vocab_size",
        "embed_bytes",
        "head_bytes",
        "kv_bytes_per_token_layer",
        "context",
    )
    lists = {key: tuple(_natural(item) for item in value[key]) for key in ("layer_bytes", "eos_ids")}
    bos = value["bos_id"]
    if not isinstance(value["tied"], bool) or len(lists["layer_bytes"]) != value["num_layers"]:
        raise ValueError("spec disagrees with itself")
    return ModelSpec(
        name=_text(value["name"]),
        digest=_text(value["digest"]),
        dtype=_text(value["dtype"]),
        tied=value["tied"],
        bos_id=None if bos is None else _natural(bos),
        layer_bytes=lists["layer_bytes"],
        eos_ids=lists["eos_ids"],
        **{key: _natural(value[key]) for key in naturals},
    )


def _record(name: str, entry: Mapping[str, Any]) -> TensorRecord:
    file, sha256 = _text(entry["file"]), _text(entry["sha256"])
    if not is_plain_file_name(file) or len(sha256) not in (0, 64):
        raise ValueError(f"tensor {name!r} has a damaged record")
    return TensorRecord(file, _text(entry["dtype"]), tuple(_natural(size) for size in entry["shape"]), sha256)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise ValueError(f"{value!r} is not a text")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise ValueError(f"{value!r} is not a size")
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
