"""What the documents of a node hold at the least, so that another program's JSON is known before anything is read from it.

A shape is a type, or made of shapes: a list stands for a list of such, a tuple for any one of them, None for null, a mapping for
an object with at least these keys. `Row`, `Each`, `RANGE` and `ABSENT` (no such key) are what those cannot say. Only what every
version tells is asked for. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Row:
    """A list of so many items, each of its own shape."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Each:
    """An object whose keys may be any, and whose values are of one shape."""

    shape: Any


class _Range:
    """``[start, end]`` of layers."""


RANGE: Final = _Range()
ABSENT: Final = object()
_NUMBER: Final = (int, float)
_HEALTH: Final = {
    **dict.fromkeys(("ram_free_mb", "ram_total_mb", "tokens_per_s"), _NUMBER),
    "queue_depth": int,
    "jammed": bool,
    "on_ac": (bool, None),
    **dict.fromkeys(("battery_pct", "temp_c"), (_NUMBER, None)),
}
_PEER: Final = {
    **dict.fromkeys(("node_id", "name", "state", "role"), str),
    **dict.fromkeys(("model", "digest", "dtype", "mesh", "http", "incompatible"), (str, None)),
    "layers": (RANGE, None),
    "loading": ({"layers": RANGE}, None),
    **dict.fromkeys(("last_heard_s", "rtt_ms", "claim_ratio"), (_NUMBER, None)),
    **dict.fromkeys(("capacity_mb", "layer_ms"), _NUMBER),
    "admitted": (bool, None),
    "status": _HEALTH,
}
_PEERS: Final = {"self": (_PEER, None), "peers": [_PEER]}
_HIVE: Final = {
    **dict.fromkeys(("model", "digest"), (str, None)),
    "status": str,
    **dict.fromkeys(("num_layers", "nodes", "min_replicas"), int),
    "stages": [Row((int, int, int))],
    "missing": [RANGE],
    "single": [Row((int, int, str))],
    "jammed": [str],
    "loading": [{"name": str, "layers": RANGE, "progress": _NUMBER}],
    "not_admitted": [{"name": str, "reason": str}],
}
_ROUTE: Final = {
    **dict.fromkeys(("signature", "status"), str),
    **dict.fromkeys(("tps", "coefficient"), (_NUMBER, None)),
    **dict.fromkeys(("prior_tps", "expected_share"), _NUMBER),
    "samples": int,
}
_ROUTING: Final = {"models": Each({"epoch": int, "candidates": [_ROUTE]})}
_STATUS: Final = {"name": str, "state": str, "layers": (RANGE, None)}
_DONE: Final = {"state": str}

DOCUMENTS: Final[Mapping[str, Any]] = {
    "/mesh/peers": _PEERS,
    "/mesh/hive": _HIVE,
    "/mesh/model": {
        **dict.fromkeys(("model", "digest", "dtype"), str),
        **dict.fromkeys(("num_layers", "hidden_size", "context", "kv_bytes_per_token_layer"), int),
        **dict.fromkeys(("embed_bytes", "head_bytes"), int),
        "layer_bytes": [int],
    },
    "/mesh/room": {
        "status": _STATUS,
        "peers": _PEERS,
        "hive": _HIVE,
        "routing": _ROUTING,
        "events": ([{"ev": str, "node": str, "name": str, "addresses": ([str], ABSENT)}], ABSENT),
    },
    "/status": _STATUS,
    "/v1/routing": _ROUTING,
    "/admin/drain": _DONE,
    "/admin/resume": _DONE,
}
"""By the end of their path."""

ANSWER: Final = {
    "tokens": [int],
    "text": str,
    "route": [{"name": str, "layers": RANGE, "compute_ms": (_NUMBER, ABSENT)}],
    "routing": {"mode": str},
    "recoveries": [{**dict.fromkeys(("from", "to", "reason"), str), "stall_ms": _NUMBER}],
    "timings": {"tokens_per_s": _NUMBER},
}
"""The answer object, which is also the last event of a stream."""

ERROR: Final = {"error": {"message": str, "code": str}}
"""What goes with a status of 400 and above."""

EVENT: Final[Mapping[str, Any]] = {
    **ERROR,
    "tokens": [int],
    "text": str,
    "route": [{"name": str}],
    "seed": (int, None),
    "digest": (str, None),
}
"""What an event of a stream may hold: of these keys each that is there is so."""


def misfit(found: Any, shape: Any) -> str:
    """Where what was found is not of a shape, and what is there instead; "" if it is."""
    wrong = _misfit(found, shape, "")
    return f"{wrong.at or 'it'} {wrong.what}" if wrong else ""


def event_misfit(event: Any) -> str:
    """As `misfit`, for an event of a streamed answer."""
    if not isinstance(event, dict):
        return misfit(event, dict)
    shape = ANSWER if "finish_reason" in event else {key: shape for key, shape in EVENT.items() if key in event}
    return misfit(event, shape)


@dataclass(frozen=True, slots=True)
class _Wrong:
    at: str
    what: str


def _misfit(found: Any, shape: Any, at: str) -> _Wrong | None:
    if isinstance(shape, tuple):
        all_wrong = [_misfit(found, one, at) for one in shape]
        return None if None in all_wrong else max(filter(None, all_wrong), key=lambda wrong: len(wrong.at))
    if not _is_such(found, shape):
        return _Wrong(at, "is missing" if found is ABSENT else f"is {_shown(found)}")
    return next(
        (wrong for part, inner, where in _parts(found, shape, at) if (wrong := _misfit(part, inner, where))), None
    )


def _is_such(found: Any, shape: Any) -> bool:
    """Right but for what it is made of."""
    if isinstance(shape, type):
        return isinstance(found, shape)
    if shape is None or shape is ABSENT:
        return found is shape
    if shape is RANGE:
        return isinstance(found, list) and [type(end) for end in found] == [int, int] and 0 <= found[0] < found[1]
    if isinstance(shape, list | Row):
        return isinstance(found, list) and (isinstance(shape, list) or len(found) == len(shape.items))
    return isinstance(found, dict)


def _parts(found: Any, shape: Any, at: str) -> Iterator[tuple[Any, Any, str]]:
    """What it is made of, the shape of each part, and where it is."""
    if isinstance(shape, list | Row):
        for i, item in enumerate(found):
            yield item, shape[0] if isinstance(shape, list) else shape.items[i], f"{at}[{i}]"
    elif isinstance(shape, Each):
        for key, value in found.items():
            yield value, shape.shape, f"{at}.{key[:40]}".lstrip(".")
    elif isinstance(shape, Mapping):
        for key, part in shape.items():
            yield found.get(key, ABSENT), part, f"{at}.{key}".lstrip(".")


def _shown(found: Any) -> str:
    try:
        text = json.dumps(found)
    except RecursionError:
        return "nested without end"
    return text if len(text) <= 60 else text[:57] + "..."
