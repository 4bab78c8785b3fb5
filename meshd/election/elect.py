"""Which range a free node takes. The heart of the election: a pure function with one answer for one set of adverts.

Order: devices that hold the whole model easily take it (a lane). Then the gaps, largest budget first; then, one level after
the other, the layers below the target number of replicas; then the slowest. A gap that several free devices are needed for is
divided so that its slowest stage is as fast as possible, faster devices getting wider ranges, none over its budget. Ties
go by rendezvous hash. Each node computes what *all* free nodes take and does its own part, so two hundred that start in
the same instant do not all take the same layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from meshd.election.capacity import Device, Sizes, capacity_for, lane_budget, sane_mb, weight_budget
from meshd.election.coverage import boundaries, counts, runs_at_most, share, throughput
from meshd.election.settings import Settings
from meshd.vocabulary import Advert, LayerRange, ModelSpec, NodeId


@dataclass(frozen=True, slots=True)
class Decision:
    """``why``: stay, gap, thin (below the target), extra (every range has its target), small (not one layer fits, or none of
    this model's: ``short_mb`` more capacity would hold the smallest layer)."""

    layers: LayerRange | None
    why: str
    short_mb: int = 0


def elect(spec: ModelSpec, adverts: Iterable[Advert], me: NodeId, settings: Settings) -> LayerRange | None:
    """The range that ``me`` should hold in this room; its own range if it has one; None if not one layer fits."""
    return decide(spec, participants(adverts, spec.digest), me, settings).layers


def participants(adverts: Iterable[Advert], digest: str) -> list[Device]:
    """The devices that hold or may hold layers of this model. A range being loaded counts as held."""
    return [
        replace(Device.of(a), layers=a.layers or (a.loading.layers if a.loading else None))
        for a in adverts
        if a.digest in ("", digest) and not a.draining
    ]


def decide(spec: ModelSpec, devices: Sequence[Device], me: NodeId, settings: Settings) -> Decision:
    """`elect` with the reason. Raises KeyError if ``me`` is not among the devices."""
    mine = next((device for device in devices if device.node_id == me), None)
    if mine is None:
        raise KeyError(me)
    if mine.layers is not None:
        return Decision(mine.layers, "stay")
    return assign(spec, devices, settings)[me]


def assign(spec: ModelSpec, devices: Sequence[Device], settings: Settings) -> dict[NodeId, Decision]:
    """What every free device takes, given what the others hold."""
    room = _Room(Sizes(spec), settings, [d for d in devices if d.layers is not None])
    free = sorted((d for d in devices if d.layers is None), key=lambda d: order(d, settings))
    lanes = [d for d in free if room.sizes.bytes(0, spec.num_layers) <= lane_budget(d.capacity_mb, settings)]
    for device in lanes:
        room.take(device, LayerRange(0, spec.num_layers), room.why())
    rest = [d for d in free if d.node_id not in room.decisions]
    for level in range(settings.target_replicas):
        rest = _fill(room, rest, level)
    for device in rest:
        _strengthen(room, device)
    return room.decisions


def order(device: Device, settings: Settings) -> tuple[int, bytes]:
    """Who chooses first: the largest budget, then rendezvous hash."""
    return -weight_budget(device.capacity_mb, settings), rendezvous(device.node_id, "order")


def rendezvous(node_id: NodeId, about: object) -> bytes:
    """A tie-breaker that differs from node to node and from question to question, and is the same everywhere."""
    return blake2b(f"{node_id}|{about}".encode(), digest_size=8).digest()


def smallest_layer_mb(spec: ModelSpec, settings: Settings) -> int:
    """The capacity below which a device holds nothing of this model."""
    sizes = Sizes(spec)
    return capacity_for(min(sizes.bytes(i, i + 1) for i in range(spec.num_layers)), settings)


class _Room:
    """The room while it is being filled."""

    def __init__(self, sizes: Sizes, settings: Settings, held: Iterable[Device]) -> None:
        self.sizes = sizes
        self.settings = settings
        self.decisions: dict[NodeId, Decision] = {}
        holders = list(held)
        self.replicas = counts((d.layers for d in holders if d.layers), sizes.num_layers)
        self.passes = throughput(holders, sizes.num_layers)
        self.edges = set(boundaries(d.layers for d in holders if d.layers))

    def why(self) -> str:
        thinnest = min(self.replicas)
        return "gap" if thinnest == 0 else "thin" if thinnest < self.settings.target_replicas else "extra"

    def take(self, device: Device, layers: LayerRange, why: str) -> None:
        self.decisions[device.node_id] = Decision(layers, why)
        self.edges |= {layers.start, layers.end}
        passes = share(device, layers)
        for layer in range(layers.start, layers.end):
            self.replicas[layer] += 1
            self.passes[layer] += passes

    def budget(self, device: Device) -> int:
        return weight_budget(device.capacity_mb, self.settings)


def _fill(room: _Room, free: list[Device], level: int) -> list[Device]:
    """Raise every layer above ``level`` replicas as far as the free devices go; who is left over."""
    why = "gap" if level == 0 else "thin"
    for run in sorted(runs_at_most(room.replicas, level), key=lambda run: (-len(run), run.start)):
        if not free:
            break
        for device, layers in _divide(room, _team(room, free, run), run):
            room.take(device, layers, why)
        free = [d for d in free if d.node_id not in room.decisions]
    for device in free:  # what is still thin is more than all of them can hold: everybody takes what it can
        window = _window(room, device, runs_at_most(room.replicas, level), gap=level == 0)
        if window is not None:
            room.take(device, window, why)
    return [d for d in free if d.node_id not in room.decisions]


def _team(room: _Room, free: Sequence[Device], run: LayerRange) -> list[Device]:
    """The fewest devices, largest first, that hold the run together, in the order of their layers; empty if none do."""
    for size in range(1, min(len(free), len(run)) + 1):
        # The two largest take the ends, where embedding and head are.
        team = [free[0], *free[2:size], *free[1 : min(size, 2)]]
        if _stages(room, team, run, None):
            return team
    return []


Stages = list[tuple[Device, LayerRange]]


def _stages(room: _Room, team: Sequence[Device], run: LayerRange, limit_ms: float | None) -> Stages:
    """Consecutive ranges within budgets, none slower than ``limit_ms``; empty if they do not reach the run's end."""
    at, stages = run.start, []
    for device in team:
        limit = run.end if limit_ms is None else min(run.end, at + int(limit_ms / device.layer_ms + 1e-9))
        end = room.sizes.reach(at, room.budget(device), limit)
        if end > at:
            stages.append((device, LayerRange(at, end)))
            at = end
    return stages if at == run.end else []


def _divide(room: _Room, team: Sequence[Device], run: LayerRange) -> Stages:
    """The team's ranges with the fastest slowest stage, cut where others cut if that costs less than the margin."""
    if not team:
        return []
    low, high = 0.0, max(device.layer_ms for device in team) * len(run)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _stages(room, team, run, middle) else (middle, high)
    stages = _stages(room, team, run, high)
    slack_ms = high * (1.0 + room.settings.margin)
    for i in range(len(stages) - 1):
        cuts = sorted(room.edges, key=lambda edge: (abs(edge - stages[i][1].end), edge))
        for cut in cuts:
            moved = _recut(room, stages, i, cut, slack_ms)
            if moved:
                stages = moved
                break
    return stages


def _recut(room: _Room, stages: Stages, i: int, cut: int, slack_ms: float) -> Stages:
    """The same stages with the end of stage ``i`` at ``cut``; empty if a budget or the slack forbids it."""
    (left, before), (right, after) = stages[i], stages[i + 1]
    if not before.start < cut < after.end:
        return []
    pair = [(left, LayerRange(before.start, cut)), (right, LayerRange(cut, after.end))]
    for device, layers in pair:
        if device.layer_ms * len(layers) > slack_ms:
            return []
        if room.sizes.bytes(layers.start, layers.end) > room.budget(device):
            return []
    return [*stages[:i], *pair, *stages[i + 2 :]]


def _window(room: _Room, device: Device, runs: Iterable[LayerRange], *, gap: bool) -> LayerRange | None:
    """The best part of the runs that fits into the device; None if no layer of them does.

    In a gap first those at the model's ends: embedding and head need the large budgets, which choose first. Elsewhere, of
    the windows at least half as wide as the widest, first those that begin and end where others do. Then the widest, those
    that leave no splinter, the slowest layers.
    """
    windows = _windows(room, device, runs, everywhere=False) or _windows(room, device, runs, everywhere=True)
    if not windows:
        return None
    widest = max(len(window) for window in windows)

    def value(window: LayerRange) -> tuple[int, ...]:
        at_an_end = 2 * (window.start == 0) + (window.end == room.sizes.num_layers) if gap else 0
        touching = (window.start in room.edges) + (window.end in room.edges)
        aligned = 0 if gap else (2 * len(window) >= widest) * (1 + (touching == 2))
        return at_an_end, aligned, len(window), touching, -min(room.passes[window.start : window.end])

    values = {window: value(window) for window in windows}
    best = max(values.values())
    return max(
        (window for window, worth in values.items() if worth == best),
        key=lambda window: rendezvous(device.node_id, window),
    )


def _windows(room: _Room, device: Device, runs: Iterable[LayerRange], *, everywhere: bool) -> set[LayerRange]:
    """What fits into the device: from the runs' ends and others' edges, or from every layer."""
    budget = room.budget(device)
    windows: set[LayerRange] = set()
    for run in runs:
        edges = [edge for edge in room.edges if run.start < edge < run.end]
        last = room.sizes.reach_back(run.end, budget, run.start)
        for start in range(run.start, run.end) if everywhere else {run.start, last, *edges} - {run.end}:
            end = room.sizes.reach(start, budget, run.end)
            windows |= {LayerRange(start, cut) for cut in (end, *edges) if start < cut <= end}
    return windows


def _strengthen(room: _Room, device: Device) -> None:
    """Every range has its target: take a part around the slowest layers."""
    slowest = min(room.passes)
    whole = LayerRange(0, room.sizes.num_layers)
    runs = runs_at_most([int(passes > slowest) for passes in room.passes], 0)
    window = _window(room, device, runs, gap=False) or _window(room, device, [whole], gap=False)
    if window is not None:
        room.take(device, window, "extra")
        return
    need = smallest_layer_mb(room.sizes.spec, room.settings)
    room.decisions[device.node_id] = Decision(None, "small", max(1, math.ceil(need - sane_mb(device.capacity_mb))))
