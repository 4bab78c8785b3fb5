"""A room that does not exist: who would hold what, what is missing, what happens without one device.

Owns the questions of ``meshd plan`` and ``meshd elect`` that need no live room. ``short_mb`` is capacity (weights and KV) that
one more device would need to hold everything missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshd.election.capacity import Device, Sizes, capacity_for, sane_ms
from meshd.election.coverage import counts, runs_at_most
from meshd.election.elect import Decision, assign
from meshd.election.settings import Settings
from meshd.vocabulary import MB, LayerRange, ModelSpec, NodeId


@dataclass(frozen=True, slots=True)
class Seat:
    """What one device of the planned room does. ``index`` is its place in the list that was given, from 0."""

    index: int
    capacity_mb: float
    layers: LayerRange | None
    weight_mb: float
    why: str
    short_mb: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``single``: layers that one device alone holds."""

    seats: tuple[Seat, ...]
    missing: tuple[LayerRange, ...]
    single: tuple[LayerRange, ...]
    short_mb: int

    @property
    def covered(self) -> bool:
        return not self.missing


def plan(
    spec: ModelSpec,
    capacities_mb: Sequence[float],
    settings: Settings,
    *,
    speeds: Sequence[float] = (),
    without: int | None = None,
) -> Plan:
    """Who holds what if these devices start in the same instant. ``speeds`` are relative, 1 by default.

    ``without``: the same seats after that device is gone for good and nobody has moved yet.
    """
    devices = [
        Device(NodeId(f"{i:032x}"), capacity, sane_ms(1.0 / speeds[i] if i < len(speeds) and speeds[i] > 0 else 1.0))
        for i, capacity in enumerate(capacities_mb)
    ]
    decisions = assign(spec, devices, settings)
    sizes = Sizes(spec)
    seats = [_seat(sizes, i, device, decisions[device.node_id]) for i, device in enumerate(devices)]
    if without is not None:
        del seats[without]
    held = [seat.layers for seat in seats if seat.layers is not None]
    replicas = counts(held, spec.num_layers)
    missing = runs_at_most(replicas, 0)
    single = runs_at_most([abs(count - 1) for count in replicas], 0)
    return Plan(tuple(seats), tuple(missing), tuple(single), short_mb(sizes, missing, settings))


def short_mb(sizes: Sizes, missing: Sequence[LayerRange], settings: Settings) -> int:
    """The capacity in MB that would hold the missing ranges, each on a device of its own."""
    return sum(capacity_for(sizes.bytes(gap.start, gap.end), settings) for gap in missing)


def _seat(sizes: Sizes, index: int, device: Device, decision: Decision) -> Seat:
    layers = decision.layers
    weight_mb = sizes.bytes(layers.start, layers.end) / MB if layers else 0.0
    return Seat(index, device.capacity_mb, layers, weight_mb, decision.why, decision.short_mb)
