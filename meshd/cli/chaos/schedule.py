"""Who is struck, when, how and for how long: a function of the room, the length and the seed. Pure.

Owns the promise that each layer keeps a replica that was not struck, except in planned outages, in which every replica of one
range is killed together. A node counts as away from its strike until ``settle_s`` after the strike's end, because it has to
start, be heard and be proven before it replaces anybody. It must not know processes, clocks or networks: the same arguments
give the same strikes, so a seed that failed can be run again.

Times are seconds from the first moment of the schedule.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshd.vocabulary import LayerRange

# How long each kind lasts, least and most. A node that is killed to restart or to be wiped starts again at once.
LASTS_S: Final[Mapping[str, tuple[float, float]]] = {
    "kill": (3.0, 8.0),
    "restart": (0.0, 0.0),
    "wipe": (0.0, 0.0),
    "freeze": (1.0, 8.0),
    "blackhole": (2.0, 8.0),
    "partition": (2.0, 8.0),
}
OUTAGE: Final = "outage"
OUTAGE_S: Final = (4.0, 6.0)
RESETS: Final = frozenset({"kill", "restart", "wipe", OUTAGE})  # the others are silence


@dataclass(frozen=True, slots=True)
class Strike:
    """``nodes`` are struck at ``at_s`` and let go ``for_s`` later."""

    at_s: float
    kind: str
    nodes: tuple[str, ...]
    for_s: float

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s

    @property
    def silent(self) -> bool:
        """True when nothing tells the others: no reset, no refusal."""
        return self.kind not in RESETS


@dataclass(frozen=True, slots=True)
class Plan:
    """What to draw from. ``outage_every_s`` None: a replica of each layer is always left. ``safe`` nodes are never struck."""

    seconds: float
    every_s: float = 2.0
    kinds: Sequence[str] = tuple(LASTS_S)
    settle_s: float = 6.0
    outage_every_s: float | None = None
    safe: frozenset[str] = frozenset()


def strikes(places: Mapping[str, LayerRange | None], plan: Plan, seed: int) -> tuple[Strike, ...]:
    """In order of time. ``places``: who holds what (None: an entry without layers); a moment at which nobody can be spared
    is left out."""
    rng = random.Random(seed)  # noqa: S311  # chaos needs no cryptography
    found = _outages(places, plan, rng)
    for i in range(1, int(plan.seconds / plan.every_s)):
        at_s = i * plan.every_s
        if any(one.at_s == at_s for one in found):
            continue
        one = _one(places, plan, at_s, found, rng)
        if one is not None:
            found.append(one)
    return tuple(sorted(found, key=lambda strike: strike.at_s))


def _outages(places: Mapping[str, LayerRange | None], plan: Plan, rng: random.Random) -> list[Strike]:
    if plan.outage_every_s is None:
        return []
    ranges = sorted({layers for layers in places.values() if layers is not None})
    found = []
    for i in range(1, int(plan.seconds / plan.outage_every_s) + 1):
        middle = (i - 0.5) * plan.outage_every_s
        at_s = round(middle / plan.every_s) * plan.every_s
        lost = rng.choice(ranges)
        holders = tuple(name for name, layers in places.items() if layers is not None and _meet(layers, lost))
        found.append(Strike(at_s, OUTAGE, holders, rng.uniform(*OUTAGE_S)))
    return found


def _one(
    places: Mapping[str, LayerRange | None], plan: Plan, at_s: float, before: Sequence[Strike], rng: random.Random
) -> Strike | None:
    """A strike that the room can bear, if there is any."""
    kind = rng.choice(list(plan.kinds))
    for_s = rng.uniform(*LASTS_S[kind])
    until_s = at_s + for_s + plan.settle_s
    others = [one for one in before if one.at_s < until_s and at_s < one.end_s + plan.settle_s]
    away = {node for one in others for node in one.nodes}
    last = max((layers.end for layers in places.values() if layers is not None), default=0)
    lost = next((set(one.nodes) for one in others if one.kind == OUTAGE), set())
    spared = [
        name
        for name in places
        if name not in away | plan.safe
        and _covered([r for n, r in places.items() if n not in away - lost | {name}], last)
    ]
    return Strike(at_s, kind, (rng.choice(spared),), for_s) if spared else None


def _covered(held: Sequence[LayerRange | None], last: int) -> bool:
    """True when every layer is in one of the ranges."""
    layers = {layer for one in held if one is not None for layer in range(one.start, one.end)}
    return len(layers) >= last


def _meet(one: LayerRange, other: LayerRange) -> bool:
    return one.start < other.end and other.start < one.end
