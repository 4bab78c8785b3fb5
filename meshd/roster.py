"""Who is in the room, joined from everything this node knows: gossip, links, admission, and itself.

Owns the one `Directory` value that everybody else reads. Pure: it is told, and it builds.

Three sources, in this order of trust for whether a node lives:

* gossip, where it knows the node: it probes, relays suspicions and hears refutations;
* links, for the nodes of ``--next`` and those that they name in their hello (deeper pools): alive until a dial fails or the
  link breaks. This is what serves where UDP does not pass;
* nothing else. A node that is merely named is shown, and tried when a route wants it.

For what a node *is* (its advert) the newest word wins whatever brought it: epoch, then incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from meshd.directory import Directory, Member
from meshd.vocabulary import Advert, Endpoint, Health, NodeId, NodeStatus

Verdict = tuple[bool | None, str]
MAX_LINKED = 1024  # nodes known by links alone; a peer cannot make us remember more


@dataclass(frozen=True, slots=True)
class _Linked:
    """A node known through links: its own hello or a neighbour's."""

    advert: Advert
    via: str
    source: Endpoint | None = None
    broken: bool = False

    @property
    def state(self) -> NodeStatus:
        if self.broken:
            return NodeStatus.DEAD
        return NodeStatus.DRAINING if self.advert.draining else NodeStatus.ALIVE


def _no_verdict(_: Advert) -> Verdict:
    return True, "not asked for (--no-admit)"


@dataclass(slots=True)
class Roster:
    """Collects facts; `build` makes the next directory of them. ``verdict`` says whether an advert's shard is proven."""

    self_id: NodeId
    verdict: Callable[[Advert], Verdict] = _no_verdict
    directory: Directory = field(init=False)
    _me: Member | None = None
    _gossip: dict[NodeId, Member] = field(default_factory=dict)
    _linked: dict[NodeId, _Linked] = field(default_factory=dict)
    _rtt_ms: dict[NodeId, float] = field(default_factory=dict)
    _claim_ratio: dict[NodeId, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory = Directory(self.self_id)

    # --- what is told -------------------------------------------------------------------------------------------------

    def set_self(self, advert: Advert, health: Health, *, proven: bool) -> None:
        """This node as it is now. ``proven``: its engine passed its own check."""
        state = NodeStatus.DRAINING if advert.draining else NodeStatus.ALIVE
        self._me = Member(advert, state, health, admitted=proven or None, admission="self-check", last_heard_s=0.0)

    def set_gossip(self, members: Iterable[Member]) -> None:
        """Everybody gossip knows, without this node."""
        self._gossip = {member.node_id: member for member in members if member.node_id != self.self_id}

    def heard(self, advert: Advert, *, via: str, source: Endpoint | None = None) -> None:
        """An advert that came over a link: from its owner (``source`` given) or from a neighbour that names it."""
        node = advert.node_id
        if node == self.self_id:
            return
        known = self._linked.get(node)
        if known is None and len(self._linked) >= MAX_LINKED:
            return
        if known is not None and _newer(known.advert, advert):
            advert = known.advert
        if source is None and known is not None:
            self._linked[node] = replace(known, advert=advert)
        else:
            self._linked[node] = _Linked(advert, via, source)

    def link_lost(self, node: NodeId) -> None:
        """No link to it can be had now."""
        known = self._linked.get(node)
        if known is not None:
            self._linked[node] = replace(known, broken=True)

    def link_up(self, node: NodeId, rtt_ms: float | None = None) -> None:
        """A proven link to it stands."""
        known = self._linked.get(node)
        if known is not None and known.broken:
            self._linked[node] = replace(known, broken=False)
        if rtt_ms is not None:
            self._rtt_ms[node] = rtt_ms

    def set_claim_ratio(self, node: NodeId, ratio: float | None) -> None:
        """Measured over claimed speed, once there is enough to say."""
        if ratio is None:
            self._claim_ratio.pop(node, None)
        else:
            self._claim_ratio[node] = ratio

    # --- what follows -------------------------------------------------------------------------------------------------

    def addresses(self, node: NodeId) -> list[Endpoint]:
        """Where a node may be reached, best first: where its packets come from, then what it says itself."""
        found: list[Endpoint] = []
        for member in (self._gossip.get(node), self._linked.get(node)):
            if member is not None:
                found += [*([member.source] if member.source else []), *member.advert.addresses]
        return list(dict.fromkeys(found))

    def build(self) -> Directory:
        """The directory as of all that was told. Its version moves only if a route could change."""
        members = [self._judged(member) for member in self._joined()]
        if self._me is not None:
            members.append(self._me)
        self.directory = self.directory.replace(members)
        return self.directory

    def _joined(self) -> Iterator[Member]:
        for node, known in self._gossip.items():
            linked = self._linked.get(node)
            yield replace(known, advert=linked.advert) if linked and _newer(linked.advert, known.advert) else known
        for node, linked in self._linked.items():
            if node not in self._gossip:
                yield Member(linked.advert, linked.state, via=linked.via, source=linked.source)

    def _judged(self, member: Member) -> Member:
        node = member.node_id
        admitted, reason = self.verdict(member.advert) if member.advert.layers is not None else (None, "")
        rtt_ms = member.rtt_ms if member.rtt_ms is not None else self._rtt_ms.get(node)
        return replace(
            member, admitted=admitted, admission=reason, rtt_ms=rtt_ms, claim_ratio=self._claim_ratio.get(node)
        )


def _newer(a: Advert, b: Advert) -> bool:
    return (a.epoch, a.incarnation) > (b.epoch, b.incarnation)
