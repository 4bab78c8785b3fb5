"""Which tensors belong to which layer, and which to the two ends, for any causal language model's checkpoint.

Owns the reading of tensor *names*. `dissect` finds the decoder's layer list generically (``model.layers.N.``,
``transformer.h.N.``, ``language_model.model.layers.N.`` ...) and sorts what lies outside of it: embeddings go with the first
layer, final norm and head with the last. Vision and audio parts of multimodal checkpoints serve no text and are left out. Pure.

Invariants: every layer below ``num_layers`` has tensors; a tied head is the embedding again. A head that is stored is the
head, whatever the config says: configs have been wrong, and transformers believes the file too. A tensor outside the layers
whose place is not evident goes to both ends: holding it in vain is cheap, missing it is not. Errors: ModelRefused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from meshd.errors import ModelRefused
from meshd.vocabulary import LayerRange

_HEAD_PARTS: Final = frozenset({"lm_head", "embed_out", "output"})
_TABLE_PARTS: Final = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "embed_in",
    "tok_embeddings",
    "embeddings",
    "embedding",
)
_TAIL_PART: Final = re.compile(r"norm|ln_f|layernorm_f|project_out|^head$")
_FIRST_PART: Final = re.compile(r"emb|wte|wpe|project_in")
_OTHER_SENSES: Final = re.compile(r"vision|visual|image|audio|speech|multi_modal|mm_projector|patch|^mtp$")
_BUFFERS: Final = re.compile(r"rotary_emb\.inv_freq\Z|\.attn\.(masked_)?bias\Z|attention\.(masked_)?bias\Z")


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Tensor names by place. ``table`` is the embedding matrix, which ``last`` has too where the head is tied to it."""

    layers: tuple[tuple[str, ...], ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    table: str
    tied: bool

    def names(self, layers: LayerRange) -> list[str]:
        """What a node must hold to serve ``layers``, without repetition: embedding first, norm and head last."""
        if layers.end > len(self.layers):
            raise ModelRefused(f"layers {layers} of a model with {len(self.layers)}")
        wanted: dict[str, None] = {}
        if layers.start == 0:
            wanted.update(dict.fromkeys(self.first))
        for layer in self.layers[layers.start : layers.end]:
            wanted.update(dict.fromkeys(layer))
        if layers.end == len(self.layers):
            wanted.update(dict.fromkeys(self.last))
        return list(wanted)


def dissect(names: Iterable[str], num_layers: int, tie: bool | None) -> Anatomy:
    """Sort a checkpoint's tensors. ``tie`` is what the config says of a tied head (None: nothing)."""
    usable = [name for name in sorted(names) if not _BUFFERS.search(name)]
    prefix = _layer_list(usable, num_layers)
    root = prefix.rpartition(".")[0]
    layers: list[list[str]] = [[] for _ in range(num_layers)]
    outside: list[str] = []
    for name in usable:
        index = _index(name, prefix)
        if index is None:
            outside.append(name)
        elif index < num_layers:  # further ones are draft heads (multi-token prediction), which nobody runs
            layers[index].append(name)
    outer = [name for name in outside if _is_text(name, root)]
    heads = [name for name in outer if _HEAD_PARTS.intersection(name.split("."))]
    tied = not any(name.endswith(".weight") for name in heads)
    if tied and tie is False:
        raise ModelRefused("the config says that the head is not tied to the embedding, and no file holds a head")
    table = _table(outer)
    body = [name for name in outer if name not in heads]
    first = tuple(name for name in body if _is_first(name) or not _is_last(name))
    last = tuple(name for name in body if _is_last(name) or not _is_first(name))
    return Anatomy(
        layers=tuple(tuple(layer) for layer in layers),
        first=first,
        last=(*last, *((table,) if tied else ()), *heads),
        table=table,
        tied=tied,
    )


def _layer_list(names: list[str], num_layers: int) -> str:
    """The prefix under which ``0 .. num_layers-1`` all occur; of several the one of the text model, then the largest."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    sizes: defaultdict[str, int] = defaultdict(int)
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts[:-1]) if part.isascii() and part.isdigit() and i > 0), None)
        if at is not None and len(parts[at]) < 6:
            prefix = ".".join(parts[:at])
            found[prefix].add(int(parts[at]))
            sizes[prefix] += 1
    text = {prefix: held for prefix, held in found.items() if not _OTHER_SENSES.search(prefix)}
    whole = [prefix for prefix, held in text.items() if held.issuperset(range(num_layers))]
    if whole:
        return max(whole, key=lambda prefix: (sizes[prefix], prefix))
    if not text:
        raise ModelRefused("no tensor names a layer (such as model.layers.0.): not a checkpoint that can be cut")
    best = max(text, key=lambda prefix: (sizes[prefix], prefix))
    lacking = min(set(range(num_layers)) - text[best])
    raise ModelRefused(
        f"the config says {num_layers} layers, and no tensor belongs to layer {lacking} ({best}.{lacking}.)"
    )


def _index(name: str, prefix: str) -> int | None:
    if not name.startswith(prefix + "."):
        return None
    part = name[len(prefix) + 1 :].partition(".")[0]
    return int(part) if part.isascii() and part.isdigit() else None


def _is_text(name: str, root: str) -> bool:
    parts = name.split(".")
    if any(_OTHER_SENSES.search(part) for part in parts):
        return False
    return not root or name.startswith(root + ".") or bool(_HEAD_PARTS.intersection(parts))


def _is_first(name: str) -> bool:
    return any(_FIRST_PART.search(part) for part in name.split(".")[:-1])


def _is_last(name: str) -> bool:
    """Norms of embeddings count too: BLOOM's comes first, LFM2's ``embedding_norm`` is its final one."""
    return any(_TAIL_PART.search(part) for part in name.split(".")[:-1])


def _table(outer: list[str]) -> str:
    for part in _TABLE_PARTS:
        found = [name for name in outer if name.split(".")[-2:] == [part, "weight"]]
        if found:
            return min(found, key=len)
    raise ModelRefused(f"no embedding matrix among {', '.join(outer[:8])}")
