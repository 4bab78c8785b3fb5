"""How many layers fit into a device: budgets in bytes, never rounded up.

Owns the arithmetic from a capacity in MB (2**20 bytes, for weights and KV, without the runtime) to the widest range that
fits at some layer. Embedding counts with layer 0, norm and head with the last layer (`ModelSpec.weight_bytes`). Capacities
that are not positive, or beyond any device, hold nothing; they are data from other devices and must not stop an election.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from meshd.election.settings import Settings
from meshd.errors import DoesNotFit
from meshd.vocabulary import MB, Advert, LayerRange, ModelSpec, NodeId

RUNTIME_MB: Final = 330  # an engine worker before its first layer (measured: torch and transformers, CPU)
MOST_MB: Final = 1 << 40  # an exabyte: who claims more has not measured
HEADROOM_MB: Final = 256  # what the rest of the device keeps
_UNKNOWN_LAYER_MS: Final = 5.0


def measured_capacity_mb(available_mb: float) -> int:
    """What a device with this much free memory may use for weights and KV."""
    return max(0, math.floor(sane_mb(available_mb) - RUNTIME_MB - HEADROOM_MB))


def weight_budget(capacity_mb: float, settings: Settings) -> int:
    """Bytes of weights that this capacity allows: the rest is KV."""
    return math.floor(sane_mb(capacity_mb) * MB * min(max(1.0 - settings.kv_reserve, 0.0), 1.0))


def lane_budget(capacity_mb: float, settings: Settings) -> int:
    """A whole model of at most this many bytes is taken whole."""
    return math.floor(sane_mb(capacity_mb) * MB * min(max(settings.lane_fraction, 0.0), 1.0))


def capacity_for(weight_bytes: int, settings: Settings) -> int:
    """The smallest capacity in whole MB whose weight budget holds so many bytes."""
    share = min(max(1.0 - settings.kv_reserve, 0.01), 1.0)
    capacity_mb = math.ceil(weight_bytes / share / MB)
    while weight_budget(capacity_mb, settings) < weight_bytes:  # float division may have come out a hair low
        capacity_mb += 1
    return capacity_mb


@dataclass(frozen=True, slots=True)
class Device:
    """A node as an election sees it. ``layers`` is what it holds or is taking; None: free."""

    node_id: NodeId
    capacity_mb: float
    layer_ms: float
    layers: LayerRange | None = None

    @classmethod
    def of(cls, advert: Advert) -> Device:
        return cls(advert.node_id, advert.capability.capacity_mb, sane_ms(advert.capability.layer_ms_1), advert.layers)


def check_fit(spec: ModelSpec, layers: LayerRange, capacity_mb: float, settings: Settings) -> None:
    """Raises DoesNotFit, by how many MB, for a range that the budget does not hold."""
    if layers.end > spec.num_layers:
        raise DoesNotFit(f"layers {layers} cannot be: {spec.name} has {spec.num_layers} layers (--layers)")
    needed_mb = capacity_for(spec.weight_bytes(layers), settings)
    if needed_mb > sane_mb(capacity_mb):
        short_mb = math.ceil(needed_mb - sane_mb(capacity_mb))
        raise DoesNotFit(
            f"layers {layers} of {spec.name} need {needed_mb} MB with room for KV, this device has"
            f" {math.floor(sane_mb(capacity_mb))}: {short_mb} MB short; take fewer layers or raise --capacity-mb"
        )


def sane_mb(capacity_mb: float) -> float:
    """A claimed capacity that can be counted with; a nonsensical one counts as none."""
    return capacity_mb if 0 < capacity_mb <= MOST_MB else 0.0


def sane_ms(layer_ms: float) -> float:
    """A claimed speed that can be divided by; unknown ones count as those of a slow laptop."""
    return layer_ms if math.isfinite(layer_ms) and layer_ms > 0.0 else _UNKNOWN_LAYER_MS


class Sizes:
    """Weight bytes of any range of one model in constant time, and how far a budget reaches."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.num_layers = spec.num_layers
        self._sums = [0, *accumulate(spec.layer_bytes)]

    def bytes(self, start: int, end: int) -> int:
        """Same as `ModelSpec.weight_bytes`."""
        spec = self.spec
        total = self._sums[end] - self._sums[start]
        if start == 0:
            total += spec.embed_bytes
        if end == self.num_layers:
            total += spec.head_bytes - (spec.embed_bytes if spec.tied and start == 0 else 0)
        return total

    def reach(self, start: int, budget: int, limit: int) -> int:
        """The largest ``end <= limit`` such that ``start..end`` fits; ``start`` if not even one layer does."""
        room = budget - (self.spec.embed_bytes if start == 0 else 0)
        end = min(limit, bisect_right(self._sums, self._sums[start] + room) - 1)
        while end > start and self.bytes(start, end) > budget:  # only the head can make this step, once
            end -= 1
        if end == self.num_layers - 1 and limit == self.num_layers and self.bytes(start, limit) <= budget:
            return limit  # a tied head may cost less than the embedding it replaces
        return max(end, start)

    def reach_back(self, end: int, budget: int, limit: int) -> int:
        """The smallest ``start >= limit`` such that ``start..end`` fits; ``end`` if not even one layer does."""
        start = end
        while start > limit and self.bytes(start - 1, end) <= budget:
            start -= 1
        return start
