"""How often each layer is held, how fast, and where it is not: the room as a list over layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from meshd.election.capacity import Device
from meshd.vocabulary import LayerRange


def counts(ranges: Iterable[LayerRange], num_layers: int) -> list[int]:
    """Replicas of each layer. Parts of ranges past the model's end do not count."""
    steps = [0] * (num_layers + 1)
    for layers in ranges:
        steps[min(layers.start, num_layers)] += 1
        steps[min(layers.end, num_layers)] -= 1
    return list(accumulate(steps[:num_layers]))


def runs_at_most(replicas: Sequence[int], level: int) -> list[LayerRange]:
    """Maximal ranges in which every layer has at most ``level`` replicas. Level 0: the gaps."""
    runs: list[LayerRange] = []
    start: int | None = None
    for layer, count in enumerate((*replicas, level + 1)):
        if count <= level and start is None:
            start = layer
        elif count > level and start is not None:
            runs.append(LayerRange(start, layer))
            start = None
    return runs


def deficit(replicas: Iterable[int], target: int) -> int:
    """Replicas missing to the target, over all layers."""
    return sum(max(0, target - count) for count in replicas)


def share(device: Device, layers: LayerRange) -> int:
    """Passes per million seconds that a device gives to each layer of its range: it spreads its time over all of them.

    An integer, so that sums do not depend on the order in which devices were heard of.
    """
    return round(1e9 / (device.layer_ms * len(layers)))


def throughput(devices: Iterable[Device], num_layers: int) -> list[int]:
    """The sum of shares at each layer; the least is what the room can deliver."""
    total = [0] * num_layers
    for device in devices:
        if device.layers is not None:
            passes = share(device, device.layers)
            for layer in range(device.layers.start, min(device.layers.end, num_layers)):
                total[layer] += passes
    return total


def boundaries(ranges: Iterable[LayerRange]) -> list[int]:
    """Where ranges begin or end, in order: a new range that ends there can replace one of them hop for hop."""
    return sorted({edge for layers in ranges for edge in (layers.start, layers.end)})
