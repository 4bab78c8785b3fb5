"""Who may leave: promises to stay, asked of a replica before a range is left.

A node that leaves layers asks admitted replicas which together hold them to stay for ``hold_s``. One grants it only if it
holds them and is neither leaving nor asking itself; if both ask, the lower id wins and the other gives its own question up.
Without every answer there is no move. So two replicas of one range cannot both leave, whatever is lost or late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshd.errors import BadFrame
from meshd.vocabulary import LayerRange, NodeId

_MAX_GRANTS = 64
_MAX_LAYER = 99_999  # the widest model name there is: hash:99999


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """Will you stay on ``layers``? ``ask_id`` is the asker's counter."""

    ask_id: int
    layers: LayerRange

    def wire(self) -> dict[str, Any]:
        """Plain data for a link message."""
        return {"ask": self.ask_id, "range": self.layers.json()}


@dataclass(frozen=True, slots=True)
class HoldAnswer:
    """The answer to the ask of that number."""

    ask_id: int
    granted: bool

    def wire(self) -> dict[str, Any]:
        """Plain data for a link message."""
        return {"ask": self.ask_id, "granted": self.granted}


def hold_request_untrusted(data: Mapping[str, Any]) -> HoldRequest:
    """Read `HoldRequest.wire`. Raises BadFrame."""
    return HoldRequest(_ask_id(data), _range(data))


def hold_answer_untrusted(data: Mapping[str, Any]) -> HoldAnswer:
    """Read `HoldAnswer.wire`. Raises BadFrame."""
    granted = data.get("granted")
    if not isinstance(granted, bool):
        raise BadFrame("a hold answer is yes or no")
    return HoldAnswer(_ask_id(data), granted)


def _ask_id(data: Mapping[str, Any]) -> int:
    value = data.get("ask")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise BadFrame("a hold message without its number")
    return value


def _range(data: Mapping[str, Any]) -> LayerRange:
    value = data.get("range")
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise BadFrame("a range is two numbers")
    start, end = value
    if any(isinstance(n, bool) or not isinstance(n, int) for n in value) or not 0 <= start < end <= _MAX_LAYER:
        raise BadFrame("a range is two numbers in order")
    return LayerRange(start, end)


class Grants:
    """What this node has promised to keep."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._until: dict[tuple[NodeId, LayerRange], float] = {}

    def grant(self, asker: NodeId, layers: LayerRange, now: float) -> bool:
        """Promise, unless too many promises stand already."""
        self._until = {key: until for key, until in self._until.items() if now < until}
        if len(self._until) >= _MAX_GRANTS and (asker, layers) not in self._until:
            return False
        self._until[asker, layers] = now + self._hold_s
        return True

    def forbids(self, leaves: Sequence[LayerRange], now: float) -> bool:
        """True while a promise covers any of these layers."""
        return any(
            now < until and part.start < held.end and held.start < part.end
            for (_, held), until in self._until.items()
            for part in leaves
        )


def whom_to_ask(
    leaves: Sequence[LayerRange], replicas: Mapping[NodeId, LayerRange]
) -> list[tuple[NodeId, LayerRange]] | None:
    """Admitted replicas that together hold what is left, each with its part; None if they do not."""
    asked: list[tuple[NodeId, LayerRange]] = []
    for part in leaves:
        at = part.start
        while at < part.end:
            holders = [(min(held.end, part.end), node) for node, held in replicas.items() if at in held]
            if not holders:
                return None
            end, node = max(holders)
            asked.append((node, LayerRange(at, end)))
            at = end
    return asked
