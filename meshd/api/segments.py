"""Which layers are held how often: segments between all ends of the held ranges. Pure.

``0..22, 0..40, 22..40`` gives ``0..22`` twice and ``22..40`` twice. Segments that nobody holds are missing, not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshd.vocabulary import LayerRange


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers between two neighbouring ends, and which of the given ranges (by their index) hold them."""

    layers: LayerRange
    holders: tuple[int, ...]

    @property
    def replicas(self) -> int:
        return len(self.holders)


def segments(ranges: Sequence[LayerRange]) -> list[Segment]:
    """The held segments in order."""
    ends = sorted({end for each in ranges for end in (each.start, each.end)})
    found = []
    for start, end in pairwise(ends):
        layers = LayerRange(start, end)
        holders = tuple(index for index, each in enumerate(ranges) if each.covers(layers))
        if holders:
            found.append(Segment(layers, holders))
    return found


def covered(held: Iterable[Segment]) -> list[LayerRange]:
    """Held layers as few ranges as possible."""
    found: list[LayerRange] = []
    for segment in held:
        if found and found[-1].end == segment.layers.start:
            found[-1] = LayerRange(found[-1].start, segment.layers.end)
        else:
            found.append(segment.layers)
    return found


def missing(held: Iterable[LayerRange], num_layers: int) -> list[LayerRange]:
    """What `covered` leaves out of ``0..num_layers``."""
    found: list[LayerRange] = []
    at = 0
    for layers in held:
        if at < min(layers.start, num_layers):
            found.append(LayerRange(at, min(layers.start, num_layers)))
        at = max(at, layers.end)
    if at < num_layers:
        found.append(LayerRange(at, num_layers))
    return found
