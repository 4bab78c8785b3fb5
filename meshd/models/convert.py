"""Turns a GGUF into a checkpoint folder: bf16 safetensors, ``config.json``, tokenizer and chat template.

Owns reading the GGUF (with the ``gguf`` package, imported here and only when called) and dequantising it, one tensor in
memory at a time. transformers' own GGUF loader needs accelerate and refuses to save what it loaded, so it is not used.

Invariant: the output is a function of the input's bytes alone, the same on every device, because the model's digest is made
of it: float32 dequantisation, rounding to nearest even, sorted JSON, tensors in the GGUF's order of layers.
Errors: ModelRefused naming the tensor or key; OSError from the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from meshd.errors import ModelRefused
from meshd.models.checkpoint_writer import TensorPlan, write_safetensors
from meshd.models.gguf_layout import Layout, read_layout
from meshd.models.gguf_tokenizer import tokenizer_files
from meshd.models.progress import Progress


def convert_gguf(
    source: Path, target: Path, progress: Progress | None = None, require_room: Callable[[int], None] | None = None
) -> None:
    """Write the model in ``source`` into the existing, empty folder ``target``. ``require_room`` is told the bytes first."""
    reader = _open(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    layout = read_layout(metadata, shapes)
    tokenizer = tokenizer_files(metadata)
    plans = sorted(_plans(reader, layout), key=lambda plan: _reading_order(plan.name))
    total = sum(plan.size_bytes for plan in plans)
    if require_room is not None:
        require_room(total)
    write_safetensors(
        target / "model.safetensors",
        plans,
        None if progress is None else lambda done: progress("convert", done, total),
    )
    _write_json(target / "config.json", layout.config)
    if tokenizer is not None:
        _write_json(target / "tokenizer.json", tokenizer[0])
        _write_json(target / "tokenizer_config.json", tokenizer[1])
    generation = {key: value for key, value in layout.config.items() if key.endswith("_token_id")}
    _write_json(target / "generation_config.json", generation)


def _open(source: Path) -> Any:
    import gguf  # noqa: PLC0415  brings numpy, which the daemon must not load

    try:
        return gguf.GGUFReader(source)
    except OSError:
        raise
    except Exception as error:  # the package raises ValueError, IndexError, UnicodeDecodeError ... on damage
        raise ModelRefused(f"{source.name} is not a readable GGUF file: {error}") from error


def _plans(reader: Any, layout: Layout) -> Iterator[TensorPlan]:
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        heads = layout.permuted_heads(tensor.name)
        if heads is not None and shape[0] % (2 * heads):
            raise ModelRefused(f"GGUF tensor {tensor.name!r} of shape {shape} cannot be cut into {heads} heads")
        count = 1
        for size in shape:
            count *= size
        yield TensorPlan(
            name=layout.checkpoint_name(tensor.name),
            dtype="BF16",
            shape=shape,
            size_bytes=2 * count,
            load=partial(_bf16_bytes, tensor, shape, heads),
        )


def _bf16_bytes(tensor: Any, shape: tuple[int, ...], heads: int | None) -> bytes:
    """The tensor dequantised, its rotary rows back in transformers' order, rounded to nearest even."""
    import gguf  # noqa: PLC0415  see _open
    import numpy as np  # noqa: PLC0415  see _open

    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ModelRefused(f"GGUF tensor {tensor.name!r} of type {tensor.tensor_type.name} cannot be read") from error
    values = np.ascontiguousarray(values, dtype=np.float32).reshape(shape)
    if not np.isfinite(values).all():
        raise ModelRefused(f"GGUF tensor {tensor.name!r} has values that are not finite")
    if heads is not None:
        pairs = shape[0] // heads // 2
        values = values.reshape(heads, pairs, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return bytes(rounded.astype("<u2").tobytes())


def _reading_order(name: str) -> tuple[int, int, str]:
    """Embedding, then layer by layer, then norm and head: a shard's pages lie together in the file."""
    parts = name.split(".")
    if parts[1:2] == ["layers"]:
        return (1, int(parts[2]), name)
    return (0 if parts[1:2] == ["embed_tokens"] else 2, 0, name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
