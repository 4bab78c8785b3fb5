"""What one request may know of the room: a planner and the newest directory, behind `recovery.Replicas`. Pure.

Reads the directory anew at every question, because it changes while an answer runs. Remembers only the arithmetic of the nodes
that were on a route: a node that died may have left the directory by the time it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from meshd.directory import Directory, Member
from meshd.routing.planner import Planner
from meshd.vocabulary import LayerRange, NodeId, NodeStatus, Route


class DirectoryReplicas:
    """Replicas of the model ``digest``."""

    def __init__(self, planner: Planner, directory: Callable[[], Directory], digest: str, route: Route = ()) -> None:
        self._planner = planner
        self._directory = directory
        self._digest = digest
        self._ariths: dict[NodeId, str] = {}
        self._remember(route)

    def replace(self, layers: LayerRange, *, avoid: Collection[NodeId], arith: str, now: float) -> Route | None:
        found = self._planner.replace(self._directory(), self._digest, layers, avoid=avoid, arith=arith, now=now)
        self._remember(found or ())
        return found

    def pending(self, layers: LayerRange) -> bool:
        return any(self._may_serve_soon(member, layers) for member in self._directory().members.values())

    def _may_serve_soon(self, member: Member, layers: LayerRange) -> bool:
        held = member.advert.layers
        return (
            member.state is NodeStatus.ALIVE
            and member.admitted is None
            and member.incompatible is None
            and member.advert.digest == self._digest
            and held is not None
            and held.start < layers.end
            and layers.start < held.end
        )

    def arith(self, node: NodeId) -> str:
        member = self._directory().get(node)
        return member.advert.arith if member else self._ariths.get(node, "")

    def _remember(self, route: Route) -> None:
        self._ariths.update({hop.node_id: self.arith(hop.node_id) for hop in route})

    def stamp(self, node: NodeId) -> tuple[int, int] | None:
        member = self._directory().get(node)
        return (member.advert.epoch, member.advert.generation) if member else None

    def draining(self, node: NodeId) -> bool:
        """True for a node that leaves, or that was found to compute nonsense."""
        member = self._directory().get(node)
        if member is None:
            return False
        return member.advert.draining or member.state is NodeStatus.DRAINING or member.admitted is False

    def expected_s(self, route: Route, rows: int) -> float:
        total_ms = 0.0
        for hop in route:
            member = self._directory().get(hop.node_id)
            if member is None:
                continue
            claim = member.advert.capability
            per_layer = claim.layer_ms_1 if rows == 1 else claim.layer_ms_64 * max(1.0, rows / 64.0)
            total_ms += per_layer * len(hop.layers)
        return total_ms / 1000.0

    def penalise(self, node: NodeId, *, reporter: NodeId, now: float) -> None:
        self._planner.penalise(node, reporter=reporter, now=now)
