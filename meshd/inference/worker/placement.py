"""Which tensors of a checkpoint a layer range needs, and what they are called in a model cut to that range.

Names are resolved with transformers' own renamings (old spellings, fused experts), so a checkpoint as it lies on the Hub is
understood. Owns no bytes: it reads names and shapes, and raises `ModelRefused` naming file, tensor and layer when a tensor of
the range is absent, misshapen, or cannot be placed, which is how an architecture that cannot be cut shows itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from meshd.errors import ModelRefused
from meshd.inference.worker.weights import Checkpoint
from meshd.vocabulary import LayerRange

BEFORE_LAYERS: Final = frozenset({
    "embed_tokens", "embeddings", "wte", "wpe", "embed_in", "word_embeddings", "word_embeddings_layernorm", "embed_positions",
    "project_in", "drop", "embed_dropout", "emb_dropout",
})  # fmt: skip
AFTER_LAYERS: Final = frozenset({
    "norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f", "layer_norm", "embedding_norm", "project_out",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a causal language model that a cut needs to know, found in an instance of it."""

    decoder: Any  # the module whose ``layers_name`` child holds the layers
    layers_name: str
    layers_path: str  # dotted, ending in "."
    embedding_path: str
    head_path: str | None
    decoder_path: str
    num_layers: int
    tied: bool


def anatomy(model: Any) -> Anatomy:
    """Find decoder, layers, embedding and head. Raises ModelRefused if the model is not built that way."""
    config = model.config.get_text_config()
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        decoder = model.base_model
    names = {module: name for name, module in model.named_modules()}
    num_layers = config.num_hidden_layers
    # some models give themselves for their decoder, which is then further in
    for owner, (name, child) in ((module, item) for module in decoder.modules() for item in module.named_children()):
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            head = model.get_output_embeddings()
            return Anatomy(
                decoder=owner,
                layers_name=name,
                layers_path=names[child] + ".",
                embedding_path=names[model.get_input_embeddings()] + ".",
                head_path=names[head] + "." if head is not None else None,
                decoder_path=names[owner] + "." if names[owner] else "",
                num_layers=num_layers,
                tied=bool(
                    getattr(config, "tie_word_embeddings", False) or getattr(model.config, "tie_word_embeddings", False)
                ),
            )
    raise ModelRefused(f"{type(model).__name__} has no list of {num_layers} layers; it cannot be cut into stages")


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the checkpoint and what the whole model calls it; ``as_stored``: it is not one of several that become one."""

    source: str
    target: str
    as_stored: bool


def named(model: Any, checkpoint: Checkpoint) -> list[Named]:
    """Every tensor of the checkpoint by its name in ``model``, which is still whole."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    shapes: dict[str, torch.Tensor] = model.state_dict()
    found = []
    for source in checkpoint.files:
        target, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, shapes)
        found.append(Named(source, target, pattern is None))
    return found


def with_stored_head(parts: Anatomy, tensors: Iterable[Named]) -> Anatomy:
    """``parts`` with a head that is not tied where the checkpoint has one: configs have been wrong about that."""
    stored = any(tensor.target == f"{parts.head_path}weight" for tensor in tensors)
    return replace(parts, tied=parts.tied and not stored)


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor to load: its name in the checkpoint and the name to load it under."""

    source: str
    target: str
    where: str


def place(
    model: Any, parts: Anatomy, checkpoint: Checkpoint, tensors: Iterable[Named], layers: LayerRange
) -> list[Placed]:
    """Those of ``tensors`` that ``layers`` needs, with layer numbers counted from ``layers.start``. ``model`` is still whole."""
    shapes: dict[str, torch.Tensor] = model.state_dict()
    placer = _Placer(model, parts, layers)
    placed: list[Placed] = []
    for tensor in tensors:
        source, target = tensor.source, tensor.target
        if tensor.as_stored and target not in shapes:
            continue  # something that older code kept, such as frequencies: no module wants it
        where = placer.where(source, target)
        if where is None:
            continue
        entry = checkpoint.entry(source, where)
        if target in shapes and tensor.as_stored and entry.shape != tuple(shapes[target].shape):
            raise ModelRefused(
                f"{checkpoint.folder / checkpoint.files[source]}: {source} ({where}) has shape {list(entry.shape)}, "
                f"{list(shapes[target].shape)} expected"
            )
        placed.append(Placed(source, placer.renumbered(source, target), where))
    return placed


class _Placer:
    """Says where a tensor belongs: the answer names it for people, None means that this range does not need it."""

    def __init__(self, model: Any, parts: Anatomy, layers: LayerRange) -> None:
        self._kind = type(model).__name__
        self._parts = parts
        self._layers = layers
        self._first = layers.start == 0
        self._last = layers.end == parts.num_layers
        paths = {module: name for name, module in model.named_modules()}
        self._children = {
            paths[child] + ".": name for name, child in parts.decoder.named_children() if name != parts.layers_name
        }

    def where(self, source: str, target: str) -> str | None:
        parts = self._parts
        if target.startswith(parts.layers_path):
            number = self._layer_number(target)
            return f"layer {number}" if number in self._layers else None
        if target.startswith(parts.embedding_path):
            return "embedding" if self._first or (self._last and parts.tied) else None
        if parts.head_path and target.startswith(parts.head_path):
            return "head" if self._last else None  # of a tied one only a bias is stored
        child = next((name for path, name in self._children.items() if target.startswith(path)), None)
        if child in BEFORE_LAYERS:
            return "embedding" if self._first else None
        if child in AFTER_LAYERS:
            return "final norm" if self._last else None
        if child is None and not target.startswith(parts.decoder_path or "\0"):
            return None  # a vision tower, or another part that text does not pass through
        raise ModelRefused(
            f"{self._kind} cannot be cut into stages: {source} belongs neither to a layer, nor to the embedding, nor to the head"
        )

    def renumbered(self, source: str, target: str) -> str:
        if not target.startswith(self._parts.layers_path):
            return source
        number = self._layer_number(target)
        pattern = rf"(^|\.)({re.escape(self._parts.layers_name)}|layers|h|blocks)\.{number}\."
        return re.sub(pattern, rf"\g<1>\g<2>.{number - self._layers.start}.", source, count=1)

    def _layer_number(self, target: str) -> int:
        return int(target[len(self._parts.layers_path) :].split(".", 1)[0])


def unloaded(model: Any) -> Iterable[str]:
    """Names of parameters and buffers that still have no bytes."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            yield name
