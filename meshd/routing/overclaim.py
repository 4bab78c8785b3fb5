"""Measured against claimed speed, node by node. Pure.

A node says how many milliseconds a layer takes it (`Capability.layer_ms_1`); answers tell what its hops really took. The ratio,
claimed over measured milliseconds, is known after 20 hops that were not jammed: the median of the last 20, so that a single
slow one says nothing. A node below a third overclaims: it is shown, and routes and the election count it with the measured
speed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from typing import Final

from meshd.directory import Member
from meshd.vocabulary import Advert, LayerRange, NodeId

HOPS: Final = 20
OVERCLAIM: Final = 1 / 3
MIN_TOKENS: Final = 8  # in a shorter answer the prompt's own pass weighs too much
MAX_NODES: Final = 1024
Run = tuple[int, int]
_LEAST: Final = 0.01  # a ratio of zero would make a layer take for ever


def as_delivered(member: Member) -> Advert:
    """The member's advert, with the measured speed in place of one that it overclaims."""
    ratio, capability = member.claim_ratio, member.advert.capability
    if ratio is None or ratio >= OVERCLAIM or not capability.layer_ms_1 > 0.0:
        return member.advert
    slower = replace(capability, layer_ms_1=capability.layer_ms_1 / max(ratio, _LEAST))
    return replace(member.advert, capability=slower)


class Overclaims:
    """The last hops of each node's engine. ``run`` is that engine: epoch and generation, as each run of a node counts its engines
    from one."""

    def __init__(self) -> None:
        self._seen: dict[NodeId, tuple[Run, deque[float]]] = {}

    def add(
        self, node: NodeId, run: Run, layers: LayerRange, *, compute_ms: float, claimed_ms: float, tokens: int
    ) -> None:
        """An answer's hop: mean ``compute_ms`` a token over ``layers``; ``claimed_ms`` a layer. Without a claim, nothing."""
        if tokens < MIN_TOKENS or not compute_ms > 0.0 or not claimed_ms > 0.0:
            return
        known, ratios = self._seen.get(node, (run, deque[float](maxlen=HOPS)))
        if known != run:
            ratios = deque(maxlen=HOPS)
        if node not in self._seen and len(self._seen) >= MAX_NODES:
            del self._seen[next(iter(self._seen))]
        ratios.append(claimed_ms * len(layers) / compute_ms)
        self._seen[node] = run, ratios

    def ratio(self, node: NodeId, run: Run) -> float | None:
        """Measured over claimed speed of this run; None before there is enough to say."""
        known, ratios = self._seen.get(node, (run, deque[float]()))
        return median(ratios) if known == run and len(ratios) == HOPS else None
