"""Who is in the room: gossip's members joined with admission's verdicts and with this node itself.

Owns the one `Directory` value that everybody else reads. Pure: it is told, and it builds. Whether a node lives is gossip's word
alone; `--next` replicas and what links see reach it through gossip too (as candidates, and as evidence), so there is one
opinion of every node and not two.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

from meshd.directory import Directory, Member
from meshd.vocabulary import BARRED, Advert, Endpoint, Health, NodeId, NodeStatus

Verdict = tuple[bool | None, str]


def _no_verdict(_: Advert) -> Verdict:
    return True, "not probed (--no-admit)"


@dataclass(slots=True)
class Roster:
    """Collects facts; `build` makes the next directory of them. ``verdict`` says whether an advert's shard is proven. Who is
    ``barred`` lives as gossip says, but no link to it can be made: whatever it proved, nothing may be built on it here."""

    self_id: NodeId
    verdict: Callable[[Advert], Verdict] = _no_verdict
    barred: Callable[[], Container[NodeId]] = frozenset
    directory: Directory = field(init=False)
    _me: Member | None = None
    _peers: list[Member] = field(default_factory=list)
    _claim_ratio: dict[NodeId, tuple[tuple[int, int], float]] = field(default_factory=dict)  # with epoch and generation

    def __post_init__(self) -> None:
        self.directory = Directory(self.self_id)

    def set_self(self, advert: Advert, health: Health, *, proven: bool) -> None:
        """This node as it is now. ``proven``: its engine passed its own check."""
        state = NodeStatus.DRAINING if advert.draining else NodeStatus.ALIVE
        self._me = Member(advert, state, health, admitted=proven or None, admission="self-check", last_heard_s=0.0)

    def set_peers(self, members: Iterable[Member]) -> None:
        """Everybody gossip knows; this node is left out, it knows itself better."""
        self._peers = [member for member in members if member.node_id != self.self_id]
        present = {member.node_id for member in self._peers}
        self._claim_ratio = {node: known for node, known in self._claim_ratio.items() if node in present}

    def set_claim_ratio(self, advert: Advert, ratio: float | None) -> None:
        """Measured over claimed speed of the engine that this advert is of, once there is enough to say. It says nothing of the
        node's next engine, nor of its next run."""
        if ratio is None:
            self._claim_ratio.pop(advert.node_id, None)
        else:
            self._claim_ratio[advert.node_id] = (advert.epoch, advert.generation), ratio

    def addresses(self, node: NodeId) -> list[Endpoint]:
        """Where a node may be reached: where its packets come from, then what it says itself."""
        member = self.directory.get(node)
        if member is None:
            return []
        return list(dict.fromkeys([*([member.source] if member.source else []), *member.advert.addresses]))

    def build(self) -> Directory:
        """The directory as of all that was told. Its version moves only if a route could change."""
        barred = self.barred()  # once: the answer may be a look at the disk
        members = [self._judged(member, barred) for member in self._peers]
        if self._me is not None:
            members.append(self._me)
        self.directory = self.directory.replace(members)
        return self.directory

    def _judged(self, member: Member, barred: Container[NodeId]) -> Member:
        if member.node_id in barred:
            return replace(member, admitted=False, admission=BARRED)
        admitted, reason = self.verdict(member.advert) if member.advert.layers is not None else (None, "")
        run, ratio = self._claim_ratio.get(member.node_id, ((0, 0), None))
        if run != (member.advert.epoch, member.advert.generation):
            ratio = None
        return replace(member, admitted=admitted, admission=reason, claim_ratio=ratio)
