"""What one request may know of the room: a planner and the newest directory, behind `recovery.Replicas`. Pure.

Owns nothing; reads the directory anew at every question, because it changes while an answer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from meshd.directory import Directory, Member
from meshd.routing.planner import Planner
from meshd.vocabulary import LayerRange, NodeId, NodeStatus, Route


class DirectoryReplicas:
    """Replicas of the model ``digest``."""

    def __init__(self, planner: Planner, directory: Callable[[], Directory], digest: str) -> None:
        self._planner = planner
        self._directory = directory
        self._digest = digest

    def replace(self, layers: LayerRange, *, avoid: Collection[NodeId], arith: str, now: float) -> Route | None:
        return self._planner.replace(self._directory(), self._digest, layers, avoid=avoid, arith=arith, now=now)

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
        return member.advert.arith if member else ""

    def stamp(self, node: NodeId) -> tuple[int, int] | None:
        member = self._directory().get(node)
        return (member.advert.epoch, member.advert.generation) if member else None

    def draining(self, node: NodeId) -> bool:
        member = self._directory().get(node)
        return member is not None and (member.advert.draining or member.state is NodeStatus.DRAINING)

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
