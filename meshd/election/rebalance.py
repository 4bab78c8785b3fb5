"""Whether a node that holds a range should hold another. A pure function of adverts, like `elect`.

A move must make the room better in this order: fewer uncovered layers, fewer replicas missing to the target, or, among the
layers that it touches, a slowest one faster by the margin. Each of these grows with every move in a still room, so moves end
and nodes cannot swap for ever. No move uncovers a layer: a last replica only grows, or stays.

A boundary between two nodes shifts in two such moves: the one with the lighter load grows into the other's range if both
together would be faster by the margin, and then the other shrinks because that alone makes it faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshd.election.capacity import RUNTIME_MB, Device, Sizes, lane_budget, sane_mb, weight_budget
from meshd.election.coverage import boundaries, counts, deficit, runs_at_most, share, throughput
from meshd.election.settings import Settings
from meshd.vocabulary import MB, LayerRange


@dataclass(frozen=True, slots=True)
class Move:
    """``leaves``: layers given up, for which somebody must promise to stay. ``beside``: old and new fit at once.
    ``why``: gap, thin or slow."""

    layers: LayerRange
    why: str
    leaves: tuple[LayerRange, ...]
    beside: bool


@dataclass(frozen=True, slots=True)
class _Worth:
    """What a range would do for the room. Ordered by `better`."""

    uncovered: int
    deficit: int


def best_move(
    sizes: Sizes, mine: Device, others: Sequence[Device], settings: Settings, *, cooled: bool, gap_only: bool = False
) -> Move | None:
    """The best move for ``mine`` (which holds layers) in this room, or None. ``cooled``: may move for anything but a gap."""
    room = _View(sizes, mine, others, settings)
    moves = [move for new in room.reachable() if (move := room.judge(new, cooled=cooled and not gap_only)) is not None]
    return max(moves, key=room.rank, default=None)


def still_worth(
    sizes: Sizes, mine: Device, others: Sequence[Device], settings: Settings, layers: LayerRange
) -> Move | None:
    """The move to ``layers`` if it still makes the room better."""
    return _View(sizes, mine, others, settings).judge(layers, cooled=True)


class _View:
    """One node's room, with what stays when the node itself goes."""

    def __init__(self, sizes: Sizes, mine: Device, others: Sequence[Device], settings: Settings) -> None:
        assert mine.layers is not None, "only holders move"  # noqa: S101 - the callers' contract
        self.sizes, self.settings, self.mine, self.old = sizes, settings, mine, mine.layers
        self.others = [d for d in others if d.layers is not None]
        self.replicas = counts((d.layers for d in self.others if d.layers), sizes.num_layers)
        self.passes = throughput(self.others, sizes.num_layers)
        self.now = self.worth(self.old)
        self.broken = self.now.uncovered > 0

    def worth(self, layers: LayerRange) -> _Worth:
        held = [count + (i in layers) for i, count in enumerate(self.replicas)]
        return _Worth(held.count(0), deficit(held, self.settings.target_replicas))

    def reachable(self) -> Iterable[LayerRange]:
        """Ranges within the budget that begin at somebody's edge (or at a gap, or inside the old range) or grow the old."""
        budget = weight_budget(self.mine.capacity_mb, self.settings)
        whole = LayerRange(0, self.sizes.num_layers)
        if self.sizes.bytes(0, whole.end) <= lane_budget(self.mine.capacity_mb, self.settings):
            return [] if self.old == whole else [whole]
        edges = {0, whole.end, *boundaries([*(d.layers for d in self.others if d.layers), self.old])}
        found: set[LayerRange] = set()
        for start in sorted(edges - {whole.end}):
            end = self.sizes.reach(start, budget, whole.end)
            found |= {LayerRange(start, cut) for cut in (end, *edges) if start < cut <= end}
        for end in edges - {0}:
            start = self.sizes.reach_back(end, budget, 0)
            if start < end:
                found.add(LayerRange(start, end))
        found |= self._grown(budget)
        return found - {self.old}

    def _grown(self, budget: int) -> set[LayerRange]:
        """The old range with more at one end: one step of shifting a boundary."""
        furthest = self.sizes.reach(self.old.start, budget, self.sizes.num_layers)
        earliest = self.sizes.reach_back(self.old.end, budget, 0)
        later = {LayerRange(self.old.start, end) for end in range(self.old.end + 1, furthest + 1)}
        return later | {LayerRange(start, self.old.end) for start in range(earliest, self.old.start)}

    def judge(self, new: LayerRange, *, cooled: bool) -> Move | None:
        """The move to ``new`` if it is allowed and makes the room better."""
        leaves = _difference(self.old, new)
        if any(self.replicas[i] == 0 for part in leaves for i in range(part.start, part.end)):
            return None
        old_bytes, new_bytes = (self.sizes.bytes(r.start, r.end) for r in (self.old, new))
        if new_bytes > weight_budget(self.mine.capacity_mb, self.settings):
            return None
        beside = old_bytes + new_bytes + RUNTIME_MB * MB <= sane_mb(self.mine.capacity_mb) * MB
        sole = any(self.replicas[i] == 0 for i in range(self.old.start, min(self.old.end, len(self.replicas))))
        # While a sole replica reloads, its layers are away. That costs nothing if the room cannot answer anyway.
        if sole and not beside and not self.broken:
            return None
        after = self.worth(new)
        if after.uncovered != self.now.uncovered:
            return Move(new, "gap", leaves, beside) if after.uncovered < self.now.uncovered else None
        if not cooled or after.deficit > self.now.deficit:
            return None
        if self.now.deficit - after.deficit >= max(1, len(new) // 5):
            return Move(new, "thin", leaves, beside)
        return Move(new, "slow", leaves, beside) if self._faster(new) else None

    def _faster(self, new: LayerRange) -> bool:
        if self._gain(new, self.passes, self.passes, self.old) >= 1.0 + self.settings.margin:
            return True
        return new.covers(self.old) and any(self._pair_gain(new, other) for other in self.others)

    def _gain(self, new: LayerRange, before: Sequence[int], after: Sequence[int], touched: LayerRange) -> float:
        """How much faster the slowest layer gets among those that change."""
        layers = {*range(touched.start, touched.end), *range(self.old.start, self.old.end), *range(new.start, new.end)}
        layers = {i for i in layers if i < self.sizes.num_layers}
        old_share, new_share = share(self.mine, self.old), share(self.mine, new)
        slowest_before = min(before[i] + (old_share if i in self.old else 0) for i in layers)
        slowest_after = min(after[i] + (new_share if i in new else 0) for i in layers)
        return slowest_after / slowest_before if slowest_before else 0.0

    def _pair_gain(self, new: LayerRange, other: Device) -> bool:
        """Growing into a neighbour pays if the neighbour then gives up what both hold."""
        if other.layers is None:
            return False
        rest = _difference(other.layers, LayerRange(min(new.start, self.old.end), new.end))
        grown_into = other.layers.end == self.old.start or other.layers.start == self.old.end
        if not grown_into or len(rest) != 1:
            return False
        others = [replace(d, layers=rest[0]) if d.node_id == other.node_id else d for d in self.others]
        after = throughput(others, self.sizes.num_layers)
        return self._gain(new, self.passes, after, other.layers) >= 1.0 + self.settings.margin

    def rank(self, move: Move) -> tuple[float, ...]:
        """Among moves that pay: most for coverage, then for the target, then for speed; then the least new weight."""
        after = self.worth(move.layers)
        fresh = sum(len(part) for part in _difference(move.layers, self.old))
        slowest = self._slowest(move.layers)
        aligned = sum(edge in self._edges() for edge in (move.layers.start, move.layers.end))
        return -after.uncovered, -after.deficit, slowest, aligned, -fresh, -move.layers.start

    def _slowest(self, layers: LayerRange) -> int:
        own = share(self.mine, layers)
        return min(passes + (own if i in layers else 0) for i, passes in enumerate(self.passes))

    def _edges(self) -> set[int]:
        return {0, self.sizes.num_layers, *boundaries(d.layers for d in self.others if d.layers)}


def _difference(a: LayerRange, b: LayerRange) -> tuple[LayerRange, ...]:
    """The parts of ``a`` outside ``b``."""
    parts = ((a.start, min(a.end, b.start)), (max(a.start, b.end), a.end))
    return tuple(LayerRange(start, end) for start, end in parts if start < end)
