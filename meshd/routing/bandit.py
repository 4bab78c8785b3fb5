"""The planner of the daemon: candidates from the directory, drawn by a bandit, penalties and load applied.

Owns what one entry knows about routes: arms, epochs, penalties, its own outstanding requests. Decides nothing about sessions
and does no I/O. Time is an argument; randomness is seeded at construction.

A candidate is *clean* when no hop is suspect, jammed or penalised. While there is a clean one, only those are drawn. If there
is none, penalties and doubts are overruled: the fewest hops that may be gone, the fewest jammed ones, then the longest-advancing
(``greedy-fallback``). A request is refused only when layers have no live, admitted holder at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from meshd.directory import Directory, Member
from meshd.errors import StageUnavailable
from meshd.routing.candidates import GONE, SLOW, Holder, cover, missing, routes
from meshd.routing.penalties import Penalties
from meshd.routing.pinned import pinned_route
from meshd.routing.planner import PlannedRoute
from meshd.routing.policy import Candidate, Draw, draw_of
from meshd.routing.prior import layer_ms, tokens_per_s
from meshd.routing.signature import arm_key, label
from meshd.routing.stats import ArmStats, Topology
from meshd.routing.table import candidate_rows
from meshd.vocabulary import Hop, LayerRange, NodeId, NodeStatus, Route

CANDIDATES: Final = 8
_DOUBT: Final = 0.1  # what a doubtful hop leaves of a prior: shown, hardly ever the best


@dataclass(slots=True)
class _Room:
    """What is remembered of one model's room: its epoch and the last search, which holds while nobody comes or goes."""

    topology: Topology = field(default_factory=Topology)
    searched: object = None
    found: list[Route] = field(default_factory=list)


class BanditPlanner:
    """Implements `Planner`. One per daemon, for all models of the room."""

    def __init__(
        self,
        *,
        explore_share: float = 0.3,
        weight_alpha: float = 1.0,
        half_life_s: float = 600.0,
        min_sample_tokens: int = 8,
        seed: int | None = None,
    ) -> None:
        self._config = {
            "explore_share": explore_share,
            "weight_alpha": weight_alpha,
            "half_life_s": half_life_s,
            "min_sample_tokens": min_sample_tokens,
        }
        self._explore_share = explore_share
        self._alpha = weight_alpha
        self._rng = Random(seed)  # noqa: S311 - spreads load, guards nothing
        self._stats = ArmStats(half_life_s=half_life_s, min_sample_tokens=min_sample_tokens)
        self._penalties = Penalties()
        self._outstanding: dict[NodeId, int] = {}
        self._rooms: dict[str, _Room] = {}
        self._last_now = 0.0

    # --- Planner ------------------------------------------------------------------------------------------------------

    def choose(
        self, directory: Directory, digest: str, num_layers: int, *, pinned: tuple[NodeId, ...] = (), now: float
    ) -> PlannedRoute:
        """A route for a new request. Raises StageUnavailable(missing) or BadRoute."""
        self._last_now = now
        if pinned:
            hops = pinned_route(directory, digest, num_layers, pinned)
            return self._planned(directory, digest, hops, "pinned")
        holders = self._holders(directory, digest, num_layers, now)
        gaps = missing((h.layers for h in holders), LayerRange(0, num_layers))
        if gaps:
            raise _unavailable(directory, digest, gaps)
        candidates = self._clean(directory, digest, num_layers, holders, now)
        if not candidates:
            return self._planned(
                directory, digest, self._fallback(holders, num_layers, self._rng, now), "greedy-fallback"
            )
        index, mode = self._draw(candidates).pick(self._rng)
        return self._planned(directory, digest, candidates[index].hops, mode)

    def replace(
        self,
        directory: Directory,
        digest: str,
        layers: LayerRange,
        *,
        avoid: Collection[NodeId],
        arith: str,
        now: float,
    ) -> Route | None:
        """Hops over exactly ``layers`` without ``avoid``: undoubted before doubtful, same ``arith`` before other, few
        hops before many, fast before slow."""
        self._last_now = now
        lost = self._penalties.touched(now)
        holders = [h for h in self._holders(directory, digest, layers.end, now) if h.node_id not in avoid]

        def cost(holder: Holder, hop: Hop) -> tuple[float, ...]:
            foreign = bool(arith) and holder.arith != arith
            return _after_losses(holder, lost), float(foreign), 1.0, self._slowness(holder, hop)

        return cover(holders, layers, self._rng, cost)

    def penalise(self, node: NodeId, *, reporter: NodeId, now: float) -> None:
        """``reporter`` lost ``node``: the pair for 30 s, the node itself only when two reporters lost it."""
        self._last_now = now
        self._penalties.report(node, reporter, now)

    def begin(self, route: PlannedRoute, now: float) -> None:
        """A request starts on it."""
        self._last_now = now
        for hop in route.hops:
            self._outstanding[hop.node_id] = self._outstanding.get(hop.node_id, 0) + 1

    def finish(self, route: PlannedRoute, ran: Route, *, tokens: int, seconds: float, failed: bool, now: float) -> None:
        """What came of it. The speed belongs to the route that ran; a planned route that did not last has failed."""
        self._last_now = now
        for hop in route.hops:
            left = self._outstanding.get(hop.node_id, 0) - 1
            if left > 0:
                self._outstanding[hop.node_id] = left
            else:
                self._outstanding.pop(hop.node_id, None)
        planned = arm_key(route.digest, route.hops)
        produced = arm_key(route.digest, ran) if ran else planned
        if failed or produced != planned:
            self._stats.fail(planned, now)
        if not failed:
            epoch = self._room(route.digest).topology.epoch
            self._stats.record(produced, tokens=tokens, seconds=seconds, epoch=epoch, now=now)

    # --- what is shown and kept ---------------------------------------------------------------------------------------

    def table(self, directory: Directory, names: Mapping[str, str], *, now: float | None = None) -> dict[str, Any]:
        """The body of ``/v1/routing``. ``names``: model names by digest. ``now`` defaults to the last call's."""
        self._last_now = self._last_now if now is None else now
        models = {name: self._model_table(directory, digest, self._last_now) for digest, name in names.items()}
        return {"config": dict(self._config), "models": models}

    def dump(self, now: float) -> dict[str, Any]:
        """Statistics as plain data, for the state folder."""
        return self._stats.dump(now)

    def load(self, data: object, now: float) -> None:
        """Take over a dump of an earlier run; all of it is stale."""
        self._stats.load(data, now)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _room(self, digest: str) -> _Room:
        return self._rooms.setdefault(digest, _Room())

    def _holders(self, directory: Directory, digest: str, num_layers: int, now: float) -> list[Holder]:
        penalised = self._penalties.nodes(now)
        members = directory.holders(digest)
        self._room(digest).topology.observe((m.node_id, m.advert.layers) for m in members)
        return [
            Holder(
                node_id=m.node_id,
                layers=m.advert.layers,
                generation=m.advert.generation,
                arith=m.advert.arith,
                layer_ms=layer_ms(m, self._outstanding.get(m.node_id, 0)),
                doubt=_doubt(m, m.node_id in penalised),
            )
            for m in members
            if m.advert.layers is not None and m.advert.layers.start < num_layers
        ]

    def _clean(
        self, directory: Directory, digest: str, num_layers: int, holders: Iterable[Holder], now: float
    ) -> list[Candidate]:
        """Candidates without a doubtful hop, best prior first."""
        clean = [h for h in holders if not h.doubtful]
        room = self._room(digest)
        facts = (num_layers, frozenset((h.node_id, h.layers, h.generation) for h in clean))
        if room.searched != facts:
            room.searched, room.found = facts, routes(clean, num_layers, self._rng)
        unpunished = [route for route in room.found if not self._crosses_penalty(directory.self_id, route, now)]
        return self._scored(digest, unpunished, clean, now)

    def _scored(self, digest: str, found: Iterable[Route], holders: Iterable[Holder], now: float) -> list[Candidate]:
        by_id = {h.node_id: h for h in holders}
        epoch = self._room(digest).topology.epoch
        scored: list[Candidate] = []
        for route in found:
            arm = self._stats.view(arm_key(digest, route), epoch=epoch, now=now)
            slowest = min(tokens_per_s(by_id[hop.node_id].layer_ms, len(hop.layers)) for hop in route)
            doubts = sum(by_id[hop.node_id].doubtful for hop in route)
            outstanding = max(self._outstanding.get(hop.node_id, 0) for hop in route)
            scored.append(Candidate(route, slowest * arm.success * _DOUBT**doubts, arm, outstanding))
        scored.sort(key=lambda candidate: -candidate.prior)
        return scored[:CANDIDATES]

    def _draw(self, candidates: list[Candidate]) -> Draw:
        return draw_of(candidates, explore_share=self._explore_share, alpha=self._alpha)

    def _crosses_penalty(self, entry: NodeId, route: Route, now: float) -> bool:
        senders = (entry, *(hop.node_id for hop in route))
        return any(self._penalties.pair(sender, hop.node_id, now) for sender, hop in zip(senders, route, strict=False))

    def _fallback(self, holders: list[Holder], num_layers: int, rng: Random, now: float) -> Route:
        lost = self._penalties.touched(now)

        def cost(holder: Holder, hop: Hop) -> tuple[float, ...]:
            return _after_losses(holder, lost), 1.0, self._slowness(holder, hop)

        found = cover(holders, LayerRange(0, num_layers), rng, cost)
        assert found is not None, "holders without a gap always make a route"  # noqa: S101 - checked by `missing`
        return found

    def _slowness(self, holder: Holder, hop: Hop) -> float:
        return (1 + self._outstanding.get(holder.node_id, 0)) / tokens_per_s(holder.layer_ms, len(hop.layers))

    def _planned(self, directory: Directory, digest: str, hops: Route, mode: str) -> PlannedRoute:
        return PlannedRoute(hops, mode, label(directory, digest, hops), digest)

    def _model_table(self, directory: Directory, digest: str, now: float) -> dict[str, Any]:
        num_layers = max((m.advert.num_layers for m in directory.holders(digest)), default=0)
        rows: list[dict[str, Any]] = []
        if num_layers:
            rows = candidate_rows(directory, digest, *self._shown(directory, digest, num_layers, now))
        return {"epoch": self._room(digest).topology.epoch, "candidates": rows}

    def _shown(
        self, directory: Directory, digest: str, num_layers: int, now: float
    ) -> tuple[list[Candidate], list[float]]:
        """What the next request would be drawn from, with the shares; doubtful routes fill up the rest at share 0."""
        holders = self._holders(directory, digest, num_layers, now)
        if missing((h.layers for h in holders), LayerRange(0, num_layers)):
            return [], []
        shown = self._clean(directory, digest, num_layers, holders, now)
        shares = self._draw(shown).shares() if shown else [1.0]
        if len(shown) < CANDIDATES:
            taken = {candidate.hops for candidate in shown}
            # Its own randomness: reading the table must not change which route a seeded planner draws next.
            others = routes(holders, num_layers, Random(0))  # noqa: S311 - orders equals
            if not shown:
                fallback = self._fallback(holders, num_layers, Random(0), now)  # noqa: S311 - orders equals
                shown = self._scored(digest, [fallback], holders, now)
                taken = {fallback}
            shown += self._scored(digest, [route for route in others if route not in taken], holders, now)
        shown = shown[:CANDIDATES]
        return shown, shares + [0.0] * (len(shown) - len(shares))


def _unavailable(directory: Directory, digest: str, gaps: list[LayerRange]) -> StageUnavailable:
    """Names the missing layers; ``pending`` when nodes that are being probed would fill all of them."""
    probed = [
        m.advert.layers
        for m in directory.members.values()
        if m.advert.digest == digest and m.advert.layers is not None and (m.routable or _may_become_routable(m))
    ]
    pending = not any(missing(probed, gap) for gap in gaps)
    return StageUnavailable(gaps, pending=pending, why="admission is pending" if pending else "")


def _doubt(member: Member, penalised: bool) -> float:
    """A jammed node answers late, a lost one perhaps not at all; one that gossip cannot reach either is the last to try."""
    if member.state is NodeStatus.SUSPECT:
        return 2 * GONE
    if penalised:
        return GONE
    return SLOW if member.last_resort else 0.0


def _after_losses(holder: Holder, lost: Collection[NodeId]) -> float:
    """A holder's doubt, when somebody lost it lately too."""
    return max(holder.doubt, GONE if holder.node_id in lost else 0.0)


def _may_become_routable(member: Member) -> bool:
    return (
        member.admitted is None
        and member.state is NodeStatus.ALIVE
        and member.incompatible is None
        and not member.advert.draining
    )
