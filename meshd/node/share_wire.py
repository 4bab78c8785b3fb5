"""How neighbours hand each other a model: the layout of the stream kinds ``models.*``. Pure.

Three questions, each a stream of its own on the pair's bulk connection:

* ``models.manifest`` {digest}: one ``manifest`` message comes back, the manifest as its body; its head says which layers the
  neighbour could serve and which small files it has. For the rehearsal model the head says how to compute it, and nothing else.
* ``models.file`` {digest, name}: that small file as ``piece`` messages, then the end.
* ``models.part`` {digest}, body: JSON ``[[tensor, offset], ...]``: those tensors from there to their ends, as ``piece`` messages.

Nothing of an answer is believed because of who sends it; see `models/shard.py`. Functions ending in ``_untrusted`` raise only
BadFrame. Sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshd.errors import BadFrame
from meshd.links.fields import integer_untrusted
from meshd.links.wire import Message
from meshd.models.headers import NAME_CAP
from meshd.models.shard import COMPANION_CAP_BYTES, COMPANIONS
from meshd.vocabulary import LayerRange, is_model_name, stored_name

PREFIX: Final = "models."
MANIFEST: Final = "models.manifest"
FILE: Final = "models.file"
PART: Final = "models.part"
OFFER: Final = "manifest"
PIECE: Final = "piece"

PIECE_BYTES: Final = 256 << 10
PART_TENSORS_CAP: Final = 128
_PART_BODY_CAP: Final = 256 << 10
_RANGES_CAP: Final = 32
_SIZE_CAP: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Offer:
    """What a neighbour has of a model. ``dtype`` names a variant (``int8``) whose files are the base model's.

    ``rehearsal`` is what ``--model`` would be for a rehearsal model; then there are no files.
    """

    name: str
    dtype: str
    held: tuple[LayerRange, ...]
    files: Mapping[str, int]  # small files that travel whole, with their sizes
    manifest: bytes
    rehearsal: str = ""


def ask_manifest(digest: str) -> Message:
    """Who has what of this model?"""
    return Message(MANIFEST, {"digest": digest})


def ask_file(digest: str, name: str) -> Message:
    """One small file."""
    return Message(FILE, {"digest": digest, "name": name})


def ask_parts(digest: str, parts: list[tuple[str, int]]) -> Message:
    """Tensors, each from an offset to its end."""
    return Message(PART, {"digest": digest}, json.dumps(parts).encode())


def file_untrusted(message: Message) -> str:
    """The small file that a question is about: one of a fixed list, never a path."""
    name = message.head.get("name")
    if name not in COMPANIONS:
        raise BadFrame("that file is no part of a model")
    return str(name)


def parts_untrusted(message: Message) -> list[tuple[str, int]]:
    """The tensors that a question is about."""
    if len(message.body) > _PART_BODY_CAP:
        raise BadFrame("too long a list of tensors")
    try:
        parts = json.loads(message.body)
    except (ValueError, RecursionError) as error:
        raise BadFrame("a list of tensors that is not JSON") from error
    if not isinstance(parts, list) or not 0 < len(parts) <= PART_TENSORS_CAP:
        raise BadFrame("not a list of tensors")
    return [_part_untrusted(part) for part in parts]


def _part_untrusted(part: Any) -> tuple[str, int]:
    if not isinstance(part, list) or len(part) != 2:
        raise BadFrame("a tensor without an offset")
    name, offset = part
    if not isinstance(name, str) or len(name) > NAME_CAP or type(offset) is not int or not 0 <= offset < _SIZE_CAP:
        raise BadFrame("a tensor with a damaged name or offset")
    return name, offset


def offer_message(offer: Offer) -> Message:
    """The answer to `ask_manifest`."""
    head: dict[str, Any] = {
        "name": offer.name,
        "dtype": offer.dtype,
        "held": [layers.json() for layers in offer.held[:_RANGES_CAP]],
        "files": [[name, size] for name, size in offer.files.items()],
    }
    if offer.rehearsal:
        head["rehearsal"] = offer.rehearsal
    return Message(OFFER, head, offer.manifest)


def offer_untrusted(message: Message) -> Offer:
    """Read it; the manifest is still only bytes."""
    head = message.head
    name, dtype, rehearsal = (head.get(key, "") for key in ("name", "dtype", "rehearsal"))
    if message.kind != OFFER or not all(isinstance(text, str) for text in (name, dtype, rehearsal)):
        raise BadFrame("not a neighbour's offer of a model")
    if not is_model_name(stored_name(name)):
        raise BadFrame("an offer of a model without a name")
    return Offer(
        name=stored_name(name),
        dtype=dtype,
        held=_held_untrusted(head.get("held", [])),
        files=_files_untrusted(head.get("files", [])),
        manifest=message.body,
        rehearsal=rehearsal,
    )


def _held_untrusted(value: Any) -> tuple[LayerRange, ...]:
    if not isinstance(value, list) or len(value) > _RANGES_CAP:
        raise BadFrame("an offer without layers")
    found = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(end) is int for end in pair):
            raise BadFrame("an offer with damaged layers")
        try:
            found.append(LayerRange(*pair))
        except ValueError as error:
            raise BadFrame(str(error)) from error
    return tuple(found)


def _files_untrusted(value: Any) -> dict[str, int]:
    if not isinstance(value, list) or len(value) > len(COMPANIONS):
        raise BadFrame("an offer with too many files")
    found: dict[str, int] = {}
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in COMPANIONS or type(pair[1]) is not int:
            raise BadFrame("an offer with a file that is no part of a model")
        if not 0 <= pair[1] <= COMPANION_CAP_BYTES:
            raise BadFrame(f"{pair[0]} is too large")
        found[pair[0]] = pair[1]
    return found


def piece_message(index: int, offset: int, data: bytes) -> Message:
    """Bytes of the ``index``-th thing that was asked for, from ``offset`` on."""
    return Message(PIECE, {"i": index, "at": offset}, data)


def piece_untrusted(message: Message) -> tuple[int, int, bytes]:
    """(index, offset, bytes)."""
    if message.kind != PIECE or not 0 < len(message.body) <= PIECE_BYTES:
        raise BadFrame(f"{message.kind} where a piece of a model was due")
    index = integer_untrusted(message.head, "i", 0, PART_TENSORS_CAP - 1)
    return index, integer_untrusted(message.head, "at", 0, _SIZE_CAP), message.body
