"""One member as this node sees it: the merged belief, and what only we know (when heard, from where, how fast).

Only a packet from the member itself moves ``last_heard_at``; relayed facts change the belief. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from meshd.directory import Member
from meshd.errors import BadDatagram
from meshd.gossip import advert_wire, wire
from meshd.gossip.membership import Belief, Rank
from meshd.gossip.statement import short_hash
from meshd.gossip.suspicion import Suspicion
from meshd.vocabulary import Advert, Endpoint, Health, NodeId, NodeStatus

_STATUS = {
    Rank.ALIVE: NodeStatus.ALIVE,
    Rank.SUSPECT: NodeStatus.SUSPECT,
    Rank.DEAD: NodeStatus.DEAD,
    Rank.LEFT: NodeStatus.LEFT,
}
_RTT_WEIGHT = 0.2  # of the newest sample
_FLAP_HALF_LIFE_S = 60.0
_ONE_WAY_AFTER = 2  # probes in a row that only others, TCP or its own packets answered


@dataclass(slots=True)
class Record:
    """Mutable; owned by one core."""

    node_id: NodeId
    belief: Belief
    since: float  # of the present rank
    advert: Advert | None = None
    blob: bytes | None = None
    last_heard_at: float | None = None
    source: Endpoint | None = None
    rtt_ms: float | None = None
    answered: bool = False  # something that only this run of ours asked: its datagrams are no recording
    via: str = "gossip"
    direct_failures: int = 0
    doubted: bool = False  # from before a pause so long that the room may have forgotten it: not passed on
    wire_seen: int | None = None  # of a run too far away to be read
    suspicion: Suspicion | None = None
    health: Health = field(default_factory=Health)
    health_at: float | None = None
    health_body: bytes = b""
    told_at: float = -1e9  # when we last told it what it stands accused of
    asked_at: float = -1e9  # when we last pulled its statement
    shown: tuple[int, Rank] | None = None  # epoch and rank of the last event about it
    _flaps: float = 0.0
    _flapped_at: float = 0.0

    @property
    def live(self) -> bool:
        return self.belief.live

    @property
    def one_way(self) -> bool:
        return self.direct_failures >= _ONE_WAY_AFTER

    @property
    def incompatible(self) -> str | None:
        """Why it is not talked to, if so."""
        seen = self.wire_seen if self.wire_seen is not None else self.advert.wire if self.advert else wire.WIRE
        return None if wire.understands(seen) else f"speaks wire version {seen}, this node {wire.WIRE}"

    def endpoints(self) -> list[Endpoint]:
        """Where to reach it: where its packets come from first, then what it advertises."""
        advertised = self.advert.addresses if self.advert else ()
        return list(dict.fromkeys((*((self.source,) if self.source else ()), *advertised)))

    def take_blob(self, blob: bytes) -> bool:
        """Keep an advert if the newest statement names it and it can be read; else nothing changes."""
        statement = self.belief.statement
        if statement is None or short_hash(blob) != statement.advert_hash:
            return False
        try:
            advert = advert_wire.decode_untrusted(blob, self.node_id, statement.epoch, statement.incarnation)
        except BadDatagram:
            return False
        self.advert, self.blob = advert, blob
        return True

    @property
    def wants_advert(self) -> bool:
        """The newest statement names an advert that we do not have."""
        statement = self.belief.statement
        return statement is None or self.blob is None or short_hash(self.blob) != statement.advert_hash

    def forget_run(self) -> None:
        """A new run replaced this one: where it was and how it answered says nothing any more."""
        self.source = self.rtt_ms = self.last_heard_at = self.wire_seen = None
        self.answered = False
        self.direct_failures = 0
        self._flaps = 0.0
        self.health, self.health_at, self.health_body = Health(), None, b""

    def measured(self, rtt_s: float) -> None:
        """It answered a ping of ours."""
        self.answered = True
        ms = rtt_s * 1000
        self.rtt_ms = ms if self.rtt_ms is None else self.rtt_ms + _RTT_WEIGHT * (ms - self.rtt_ms)

    def flapped(self, now: float) -> None:
        """It was accused and was not dead after all."""
        self._flaps = self.flaps(now) + 1
        self._flapped_at = now

    def flaps(self, now: float) -> float:
        """How often lately; halves every minute."""
        return self._flaps * math.exp2((self._flapped_at - now) / _FLAP_HALF_LIFE_S)

    def snapshot(self, now: float) -> Member | None:
        """The public view; None while no advert is known."""
        if self.advert is None:
            return None
        state = _STATUS[self.belief.rank]
        if state is NodeStatus.ALIVE and self.advert.draining:
            state = NodeStatus.DRAINING
        return Member(
            advert=replace(self.advert, epoch=self.belief.epoch, incarnation=self.belief.incarnation),
            state=state,
            health=self.health,
            last_heard_s=None if self.last_heard_at is None else max(0.0, now - self.last_heard_at),
            rtt_ms=self.rtt_ms,
            one_way=self.one_way,
            incompatible=self.incompatible,
            via=self.via,
            source=self.source,
        )
