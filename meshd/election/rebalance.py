"""Whether a node that holds a range should hold another. A pure function of adverts, like `elect`.

A move must make the room better: fewer uncovered layers; or, for a move elsewhere, fewer replicas missing to the target; or,
with none more missing, a slowest layer faster by the margin among those it touches. No move uncovers a layer: a last
replica only grows, or stays.

``others`` is the room as it will be, with what is being taken. Whether it answers now is another question (``answers``): who
moves away serves its old range until it has the new one, so a gap to come is no reason to stop serving.

A boundary between two nodes shifts in two moves: the one with the lighter load grows into the other's range if both
together would be faster by the margin, and then the other shrinks to that boundary because that alone makes it faster.
Growing for any other reason would not pay: half a replica survives nobody's death and makes routes uneven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshd.election.capacity import RUNTIME_MB, Device, Sizes, lane_budget, sane_mb, weight_budget
from meshd.election.coverage import boundaries, counts, deficit, share, throughput
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
    """What the room is like with the node on some range. ``thinnest`` counts up to the target."""

    uncovered: int
    deficit: int
    thinnest: int


def best_move(
    sizes: Sizes,
    mine: Device,
    others: Sequence[Device],
    settings: Settings,
    *,
    cooled: bool,
    answers: bool = False,
    loaded: LayerRange | None = None,
) -> Move | None:
    """The best move for ``mine`` (which holds layers) in this room, or None. ``cooled``: may move for anything but a gap.
    ``loaded``: what its engine has in memory, where it offers less than that."""
    room = _View(sizes, mine, others, settings, answers=answers, loaded=loaded)
    moves = [move for new in room.reachable() if (move := room.judge(new, cooled=cooled)) is not None]
    return max(moves, key=room.rank, default=None)


def still_worth(
    sizes: Sizes,
    mine: Device,
    others: Sequence[Device],
    settings: Settings,
    layers: LayerRange,
    *,
    answers: bool = False,
    loaded: LayerRange | None = None,
) -> Move | None:
    """The move to ``layers`` if it still makes the room better."""
    return _View(sizes, mine, others, settings, answers=answers, loaded=loaded).judge(layers, cooled=True)


class _View:
    """One node's room, with what stays when the node itself goes."""

    def __init__(
        self,
        sizes: Sizes,
        mine: Device,
        others: Sequence[Device],
        settings: Settings,
        *,
        answers: bool,
        loaded: LayerRange | None,
    ) -> None:
        assert mine.layers is not None, "only holders move"  # noqa: S101 - the callers' contract
        self.sizes, self.settings, self.mine, self.old = sizes, settings, mine, mine.layers
        self.loaded = loaded or self.old
        self.others = [d for d in others if d.layers is not None]
        self.replicas = counts((d.layers for d in self.others if d.layers), sizes.num_layers)
        self.passes = throughput(self.others, sizes.num_layers)
        self.now = self.worth(self.old)
        self.answers = answers or self.now.uncovered == 0
        told = boundaries(d.layers for d in self.others if d.layers)
        self.edges = {0, sizes.num_layers, *(edge for edge in told if edge < sizes.num_layers)}  # the others' word
        self.lane = sizes.bytes(0, sizes.num_layers) <= lane_budget(mine.capacity_mb, settings)

    def worth(self, layers: LayerRange) -> _Worth:
        held = [count + (i in layers) for i, count in enumerate(self.replicas)]
        target = self.settings.target_replicas
        return _Worth(held.count(0), deficit(held, target), min(target, *held))

    def reachable(self) -> Iterable[LayerRange]:
        """Ranges within the budget that begin at somebody's edge (or at a gap, or inside the old range) or grow the old."""
        budget = weight_budget(self.mine.capacity_mb, self.settings)
        whole = LayerRange(0, self.sizes.num_layers)
        if self.lane:
            return [] if self.old == whole else [whole]
        edges = self.edges | {self.old.start, self.old.end}
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
        if not self.fits(new):
            return None
        why = self._why(new, cooled=cooled)
        return Move(new, why, _difference(self.old, new), self._beside(new)) if why else None

    def fits(self, new: LayerRange) -> bool:
        """Within the budget, and nobody misses what is left."""
        within = self.sizes.bytes(new.start, new.end) <= weight_budget(self.mine.capacity_mb, self.settings)
        return within and not self._takes_away(_difference(self.old, new), beside=self._beside(new))

    def _beside(self, new: LayerRange) -> bool:
        """Old and new fit at once; offering less needs no second worker, nor does offering more of what is loaded."""
        has_bytes, new_bytes = (self.sizes.bytes(r.start, r.end) for r in (self.loaded, new))
        both = has_bytes + new_bytes + RUNTIME_MB * MB <= sane_mb(self.mine.capacity_mb) * MB
        return both or self.old.covers(new) or (self.loaded.covers(new) and new.covers(self.old))

    def _takes_away(self, leaves: tuple[LayerRange, ...], *, beside: bool) -> bool:
        """True when layers would have no replica after the move, or during it."""
        if any(self.replicas[i] == 0 for part in leaves for i in range(part.start, part.end)):
            return True
        sole = 0 in self.replicas[self.old.start : self.old.end]
        # While a sole replica reloads, its layers are away. That costs nothing if the room cannot answer anyway.
        return sole and not beside and self.answers

    def _why(self, new: LayerRange, *, cooled: bool) -> str:
        after = self.worth(new)
        if after.uncovered < self.now.uncovered:
            return "gap"
        if after.uncovered > self.now.uncovered or not cooled:
            return ""
        if new.covers(self.old) and not self.lane:
            return "slow" if self._speedup(new) >= 1.0 + self.settings.margin else ""
        if self._thickens(new, after):
            return "thin"
        shrinks = self.old.covers(new) and {new.start, new.end} <= self.edges and after.thinnest >= self.now.thinnest
        faster = self._speedup(new) >= 1.0 + self.settings.margin
        pays = faster and (after.deficit <= self.now.deficit or (shrinks and not self._regretted(new)))
        return "slow" if pays else ""

    def _thickens(self, new: LayerRange, after: _Worth) -> bool:
        """Elsewhere enough layers get a replica that they lack; a range that only grows or shrinks is judged by speed."""
        elsewhere = not self.old.covers(new) and (self.lane or not new.covers(self.old))
        return elsewhere and self.now.deficit - after.deficit >= max(1, len(new) // 5)

    def _regretted(self, new: LayerRange) -> bool:
        """From ``new`` this node would move on to where replicas are missing: what it has given up there it would miss, and come
        back for the sake of speed, and so for ever."""
        mine = replace(self.mine, layers=new)
        there = _View(self.sizes, mine, self.others, self.settings, answers=self.answers, loaded=self.loaded)
        return any(there.fits(other) and there._thickens(other, there.worth(other)) for other in there.reachable())

    def _speedup(self, new: LayerRange) -> float:
        """What the move makes of the slowest layer it touches; for a growing range, once the neighbour has shrunk."""
        if new.covers(self.old):
            return max((self._pair_gain(new, other) for other in self.others), default=0.0)
        return self._gain(new, self.passes, self.old)

    def _gain(self, new: LayerRange, after: Sequence[int], touched: LayerRange) -> float:
        """How much faster the slowest layer gets among those that change."""
        layers = {*range(touched.start, touched.end), *range(self.old.start, self.old.end), *range(new.start, new.end)}
        layers = {i for i in layers if i < self.sizes.num_layers}
        old_share, new_share = share(self.mine, self.old), share(self.mine, new)
        slowest_before = min(self.passes[i] + (old_share if i in self.old else 0) for i in layers)
        slowest_after = min(after[i] + (new_share if i in new else 0) for i in layers)
        return slowest_after / slowest_before if slowest_before else 0.0

    def _pair_gain(self, new: LayerRange, other: Device) -> float:
        """The speed-up if this node grows into a neighbour, which then gives up what both hold."""
        if other.layers is None or (other.layers.end != self.old.start and other.layers.start != self.old.end):
            return 0.0
        rest = _difference(other.layers, new)
        if len(rest) != 1 or rest[0] == other.layers:
            return 0.0
        others = [replace(d, layers=rest[0]) if d.node_id == other.node_id else d for d in self.others]
        return self._gain(new, throughput(others, self.sizes.num_layers), other.layers)

    def rank(self, move: Move) -> tuple[float, ...]:
        """Among moves that pay: most for coverage, then for the target, then for speed; then the least new weight."""
        after = self.worth(move.layers)
        fresh = sum(len(part) for part in _difference(move.layers, self.old))
        aligned = sum(edge in self.edges for edge in (move.layers.start, move.layers.end))
        missing = 0 if move.why == "slow" else after.deficit
        return -after.uncovered, -missing, self._speedup(move.layers), aligned, -fresh, -move.layers.start


def _difference(a: LayerRange, b: LayerRange) -> tuple[LayerRange, ...]:
    """The parts of ``a`` outside ``b``."""
    parts = ((a.start, min(a.end, b.start)), (max(a.start, b.end), a.end))
    return tuple(LayerRange(start, end) for start, end in parts if start < end)
