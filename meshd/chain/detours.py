"""Who replaces whom: the choice an entry makes from its evidence. Pure.

Owns what is held against nodes (`Blame`) and who was tried for the token that is waited for. It must not know steps or timers;
`session` decides when to ask.

The order in which hops are tried for the layers of a lost one (`around`):

1. nobody who was lost or suspected in the last 30 s;
2. anybody but who is bad right now: if everybody is penalised the penalty is ignored;
3. if another hop reported the loss: somebody else in that hop's place, once, for it may be their link that broke;
4. the lost node itself, if it was a broken link or a refusal: perhaps it has restarted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from meshd.chain.evidence import Blame
from meshd.chain.messages import Why
from meshd.chain.recovery import Replicas, Rerouted, reroute
from meshd.vocabulary import NodeId, Route


class Detours:
    """Of one request."""

    def __init__(self, self_id: NodeId, replicas: Replicas) -> None:
        self._self = self_id
        self._replicas = replicas
        self._blame = Blame(replicas.stamp)
        self._tried: set[NodeId] = set()
        self._bypassed = False

    def lost(self, node: NodeId, why: Why, reporter: NodeId, now: float) -> None:
        """``node`` is out. All requests of this entry hear of it, unless it only had no room."""
        self._blame.add(node, why, now)
        if why is not Why.FULL:
            self._replicas.penalise(node, reporter=reporter, now=now)

    def came_through(self, nodes: Iterable[NodeId]) -> None:
        """A token: ``nodes`` are forgiven."""
        self._blame.token(nodes)

    def next_token(self) -> None:
        """Nobody has been tried for it."""
        self._tried.clear()
        self._bypassed = False

    def full(self, route: Route, bad: Set[NodeId], now: float) -> bool:
        """True when there would be a way around the ``bad`` if those that had no room had it."""
        full = self._blame.full()
        return bool(full) and not self._reroute(route, bad, "full", [self._blame.hopeless() - full], now).missing

    def around(self, route: Route, bad: Set[NodeId], reason: str, reporter: NodeId, now: float) -> Rerouted:
        """``route`` without the ``bad``, whom ``reporter`` could not reach."""
        avoid, hopeless = bad | self._blame.avoid(now), self._blame.hopeless()
        found = self._reroute(route, bad, reason, [avoid, bad | hopeless], now)
        another = reason == "reset" and reporter != self._self and reporter not in bad
        if found.missing and another and not self._bypassed:  # two who cannot reach a node are right
            self._bypassed = True
            instead = self._reroute(route, {reporter}, reason, [avoid | {reporter}], now)
            found = found if instead.missing else instead
        if found.missing:
            found = self._reroute(route, bad, reason, [hopeless], now)
        return found

    def beside(self, route: Route, slow: Set[NodeId], reason: str, now: float) -> Rerouted | None:
        """A second route without the ``slow``, nobody of whom is tried again for this token; None if nobody can stand in. It may
        go through who was lost, whom others may reach, and not through who had no room, which nobody gets."""
        self._tried |= slow
        for node in slow:
            self._blame.add(node, None, now)
        tiers = [self._tried | self._blame.avoid(now), self._tried | self._blame.full()]
        replaceable = {node for node in slow if not self._reroute(route, {node}, reason, tiers, now).missing}
        found = self._reroute(route, replaceable, reason, tiers, now) if replaceable else None
        return None if found is None or found.missing else found

    def before(self, route: Route, draining: Set[NodeId], now: float) -> Rerouted | None:
        """A route for when the ``draining`` are gone; None if there is none."""
        found = self._reroute(route, draining, "drain", [draining | self._blame.avoid(now), draining], now)
        return None if found.missing or not found.swaps else found

    def _reroute(
        self, route: Route, bad: Set[NodeId], reason: str, tiers: Sequence[Set[NodeId]], now: float
    ) -> Rerouted:
        return reroute(route, bad, reason=reason, replicas=self._replicas, tiers=tiers, now=now)
