"""The seam: one immutable joint view of members and admission verdicts.

Gossip knows who lives, admission knows who is proven, links know who answers; everybody else reads this. Only the daemon
builds it (`Directory.replace`) and hands each new value to whoever cares, so no reader ever sees half an update.

``version`` changes when a route could change (join, leave, state, range, admission), not when health does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshd.vocabulary import Advert, Endpoint, Health, LayerRange, NodeId, NodeStatus


@dataclass(frozen=True, slots=True)
class Member:
    """One node as seen from here. ``admitted``: True proven, False refused, None not yet probed (not routed to)."""

    advert: Advert
    state: NodeStatus = NodeStatus.ALIVE
    health: Health = field(default_factory=Health)
    admitted: bool | None = None
    admission: str = ""  # the reason behind ``admitted``
    last_heard_s: float | None = None  # age of the last packet from the node itself
    rtt_ms: float | None = None
    one_way: bool = False
    incompatible: str | None = None
    claim_ratio: float | None = None  # measured speed / claimed speed
    via: str = ""  # how it was first heard of: mdns, join, next, gossip, remembered
    source: Endpoint | None = None  # the address its packets come from

    @property
    def node_id(self) -> NodeId:
        return self.advert.node_id

    @property
    def routable(self) -> bool:
        """May get traffic: alive (or suspect, as a last resort), proven, compatible, with layers."""
        return (
            self.state in (NodeStatus.ALIVE, NodeStatus.SUSPECT)
            and self.admitted is True
            and self.incompatible is None
            and self.advert.layers is not None
            and not self.advert.draining
        )

    def proven(self, *, judged: bool) -> bool:
        """Whether its layers may be relied on. ``judged``: this node proves shards of that model; of another it cannot, so there
        only a refusal counts."""
        return self.admitted is True or (self.admitted is None and not judged)

    @property
    def last_resort(self) -> bool:
        """Used only when nobody better holds the layers."""
        return self.state is NodeStatus.SUSPECT or self.health.jammed


@dataclass(frozen=True, slots=True)
class Directory:
    """Everybody known, this node included. Immutable; compare ``version`` to see whether routes may have changed."""

    self_id: NodeId
    members: Mapping[NodeId, Member] = field(default_factory=lambda: MappingProxyType({}))
    version: int = 0

    def replace(self, members: Iterable[Member]) -> Directory:
        """The next directory. The version moves only if something that routing depends on did."""
        table = MappingProxyType({member.node_id: member for member in members})
        changed = {key: _routing_facts(m) for key, m in table.items()} != {
            key: _routing_facts(m) for key, m in self.members.items()
        }
        return Directory(self.self_id, table, self.version + changed)

    def get(self, node_id: NodeId) -> Member | None:
        return self.members.get(node_id)

    @property
    def me(self) -> Member | None:
        """This node, once it has an advert."""
        return self.members.get(self.self_id)

    @property
    def peers(self) -> list[Member]:
        """Everybody else, in a stable order."""
        return [m for key, m in sorted(self.members.items()) if key != self.self_id]

    def replicas(self, layers: LayerRange, digest: str) -> list[Member]:
        """Routable members that hold all of ``layers`` of that model, in a stable order."""
        return [
            m
            for _, m in sorted(self.members.items())
            if m.routable
            and m.advert.digest == digest
            and m.advert.layers is not None
            and m.advert.layers.covers(layers)
        ]

    def holders(self, digest: str) -> list[Member]:
        """Routable members of that model, in a stable order."""
        return [m for _, m in sorted(self.members.items()) if m.routable and m.advert.digest == digest]

    def label(self, node_id: NodeId) -> str:
        """The node's name, made unique (``name~3fa2``) where two members share it."""
        member = self.members.get(node_id)
        if member is None:
            return node_id[:8]
        name = member.advert.name
        shared = sum(m.advert.name == name for m in self.members.values()) > 1
        return f"{name}~{node_id[:4]}" if shared else name

    def find(self, text: str) -> Member | None:
        """The member meant by a node id, a label or an unambiguous name."""
        by_id = self.members.get(NodeId(text))
        if by_id is not None:
            return by_id
        found = [m for m in self.members.values() if text in (m.advert.name, self.label(m.node_id))]
        exact = [m for m in found if self.label(m.node_id) == text]
        return exact[0] if exact else found[0] if len(found) == 1 else None


def _routing_facts(member: Member) -> tuple[object, ...]:
    a = member.advert
    return (
        *(member.state, member.admitted, member.incompatible),
        *(a.epoch, a.addresses, a.digest, a.layers, a.generation, a.num_layers, a.draining, a.entry, a.name),
    )
