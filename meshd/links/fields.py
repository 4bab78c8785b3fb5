"""Single fields of a message's head, as a peer or a worker sent them: each is checked before anything is built from it. Pure.

Every function raises only BadFrame, which names the field. ``value`` is what stands in a place, ``head`` what a place is looked
up in; a bool is no number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, TypeVar

from meshd.errors import BadFrame
from meshd.vocabulary import LayerRange, NodeId, is_node_id

MAX_LAYERS: Final = 1 << 16
MAX_DIGEST: Final = 64
_E = TypeVar("_E", bound=StrEnum)


def whole_untrusted(value: object, name: str, low: int, high: int) -> int:
    """An integer within bounds."""
    if type(value) is not int or not low <= value <= high:
        raise BadFrame(f"{name}: not an integer in {low}..{high}")
    return value


def integer_untrusted(head: Mapping[str, Any], name: str, low: int, high: int, *, default: int | None = None) -> int:
    """An integer within bounds, by its name."""
    return whole_untrusted(head.get(name, default), name, low, high)


def finite_untrusted(value: object, name: str) -> float:
    """A number that is finite."""
    if (type(value) is not float and type(value) is not int) or not math.isfinite(value):
        raise BadFrame(f"{name}: not a finite number")
    return float(value)


def amount_untrusted(head: Mapping[str, Any], name: str) -> float:
    """A number that is finite and not negative, by its name; 0 when missing."""
    value = finite_untrusted(head.get(name, 0.0), name)
    if value < 0:
        raise BadFrame(f"{name}: negative")
    return value


def text_untrusted(head: Mapping[str, Any], name: str, longest: int) -> str:
    """A text, by its name."""
    value = head.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise BadFrame(f"{name}: not a text of at most {longest} characters")
    return value


def word_untrusted(kind: type[_E], head: Mapping[str, Any], name: str) -> _E:
    """One of the words of ``kind``, by its name."""
    value = text_untrusted(head, name, 20)
    try:
        return kind(value)
    except ValueError:
        raise BadFrame(f"{name}: {value!r} is unknown") from None


def list_untrusted(head: Mapping[str, Any], name: str, longest: int) -> list[Any]:
    """A list of anything, by its name."""
    value = head.get(name)
    if not isinstance(value, (list, tuple)) or len(value) > longest:
        raise BadFrame(f"{name}: not a list of at most {longest}")
    return list(value)


def node_untrusted(value: object, name: str) -> NodeId:
    """A node's id."""
    if not isinstance(value, str) or not is_node_id(value):
        raise BadFrame(f"{name}: not a node id")
    return NodeId(value)


def range_untrusted(value: object, name: str) -> LayerRange:
    """Layers, as [start, end]."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise BadFrame(f"{name}: not a layer range")
    start = whole_untrusted(value[0], name, 0, MAX_LAYERS)
    return LayerRange(start, whole_untrusted(value[1], name, start + 1, MAX_LAYERS))


def layers_untrusted(head: Mapping[str, Any]) -> LayerRange:
    """The layers that a message is about."""
    return range_untrusted(head.get("layers"), "layers")


def digest_untrusted(head: Mapping[str, Any]) -> str:
    """The model that a message is about."""
    digest = text_untrusted(head, "digest", MAX_DIGEST)
    if not digest:
        raise BadFrame("digest: empty")
    return digest
