"""What the parts of a core share: the members, the timers, the news, and the one place where payloads are put together.

Owns composition: which rumours and whose health ride on a datagram that leaves anyway. Invariant: no payload is larger than
`PAYLOAD_BYTES`, whatever there is to tell; what does not fit waits for the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Final

from meshd.gossip import health_wire, wire
from meshd.gossip.awareness import Awareness
from meshd.gossip.effects import Effect, Send
from meshd.gossip.guard import Guard
from meshd.gossip.limits import PAYLOAD_BYTES
from meshd.gossip.member import Record
from meshd.gossip.membership import Rank
from meshd.gossip.ring import Ring
from meshd.gossip.rumours import Rumours
from meshd.gossip.settings import GossipSettings
from meshd.gossip.statement import Statement
from meshd.gossip.timers import Timers
from meshd.gossip.wire import Kind, Word
from meshd.vocabulary import Endpoint, Health, NodeId

TimerKey = tuple[str, object]

_HEAD_BYTES: Final = 48  # map head, version, kind, sequence, digest, subject, two array heads
_HEALTH_BYTES: Final = 52  # the longest record


class Room:
    """Shared state of one core; every part holds a reference and none holds a copy."""

    def __init__(self, node_id: NodeId, settings: GossipSettings, rng: Random, now: float) -> None:
        self.node_id = node_id
        self.settings = settings
        self.rng = rng
        self.records: dict[NodeId, Record] = {}  # everybody else
        self.timers: Timers[TimerKey] = Timers()
        self.rumours = Rumours()
        self.ring = Ring(node_id)
        self.guard = Guard(settings, now)
        self.awareness = Awareness(settings.awareness_max, enabled=settings.lifeguard)
        self.effects: list[Effect] = []
        self.statement: Statement | None = None  # our own newest
        self.blob = b""  # our own advert
        self.unaccused = 0  # members believed alive, ourselves not counted
        self._health: tuple[bytes, float] | None = None
        self._fresh: OrderedDict[NodeId, None] = OrderedDict()  # whose health we know, freshest last
        self._whose: dict[bytes, NodeId | None] = {}  # health prefixes; None where two members share one

    # --- members

    @property
    def live_peers(self) -> int:
        """Alive or suspect members, ourselves not counted."""
        return self.ring.others

    @property
    def members(self) -> int:
        """How many are in the room, ourselves included."""
        return self.ring.others + 1

    def admit(self, record: Record) -> None:
        """A member we had not heard of."""
        self.records[record.node_id] = record
        self.ring.add(record.node_id)
        prefix = health_wire.who(record.node_id)
        self._whose[prefix] = None if prefix in self._whose else record.node_id

    def forget(self, node_id: NodeId) -> None:
        """A tombstone ran out."""
        self.records.pop(node_id, None)
        self._fresh.pop(node_id, None)
        self._whose.pop(health_wire.who(node_id), None)
        self.rumours.drop(node_id)

    def talkable(self) -> list[Record]:
        """Live members that understand us."""
        return [r for r in self.records.values() if r.live and r.incompatible is None]

    def some(self, count: int, *, but: NodeId | None = None, suspects: bool = True) -> list[Record]:
        """Up to ``count`` talkable members at random, without looking at all of them."""
        chosen: list[Record] = []
        for node_id in self.ring.shuffled(self.rng, 2 * count + 6):
            record = self.records[node_id]
            unfit = node_id == but or record.incompatible is not None or not record.endpoints()
            if not unfit and (suspects or record.belief.rank is Rank.ALIVE):
                chosen.append(record)
            if len(chosen) == count:
                break
        return chosen

    # --- health

    def set_health(self, health: Health, now: float) -> None:
        self._health = (health_wire.body(health), now)

    def own_health(self, now: float) -> bytes | None:
        """Our record, packed."""
        if self._health is None:
            return None
        return health_wire.head(self.node_id, now - self._health[1]) + self._health[0]

    def jammed(self, who: bytes) -> bool:
        """Whether that member is jammed, as far as we know."""
        node_id = self._whose.get(who)
        return node_id is not None and self.records[node_id].health.jammed

    def heard_health(self, record: health_wire.HealthRecord, now: float) -> Record | None:
        """Keep it if it is newer than what we have; the member it is of, if so."""
        node_id = self._whose.get(record.who)
        member = self.records.get(node_id) if node_id is not None else None
        sampled_at = now - record.age_s
        if member is None or record.age_s > self.settings.health_max_age_s:
            return None
        if member.health_at is not None and sampled_at <= member.health_at:
            return None
        member.health, member.health_at = record.health, sampled_at
        member.health_body = health_wire.body(record.health)
        self._fresh[member.node_id] = None
        self._fresh.move_to_end(member.node_id)
        return member

    def _others_health(self, count: int, now: float, but: NodeId | None) -> list[bytes]:
        chosen: list[bytes] = []
        for node_id in reversed(self._fresh):
            if len(chosen) >= count:
                break
            record = self.records[node_id]
            if node_id == but or not record.live or record.health_at is None:
                continue
            if now - record.health_at <= self.settings.health_max_age_s:
                chosen.append(health_wire.head(node_id, now - record.health_at) + record.health_body)
        return chosen

    # --- sending

    def own_word(self, *, advert: bool) -> bytes:
        """Our newest statement as a rumour."""
        assert self.statement is not None  # noqa: S101 - a core sets its advert before it sends anything
        return wire.pack_word(Word(self.statement.encoded, self.blob if advert else None))

    def send(
        self,
        kind: Kind,
        to: Endpoint,
        now: float,
        *,
        seq: int = 0,
        first: Sequence[bytes] = (),
        subject: NodeId | None = None,
        wants: Sequence[NodeId] = (),
        receiver: NodeId | None = None,
        others: int = 0,
        riders: bool = True,
        round_: int | None = None,
    ) -> None:
        """One datagram: ``first`` certainly, then rumours, then our health and that of up to ``others`` as they fit."""
        if self.statement is None:
            return
        room = PAYLOAD_BYTES - _HEAD_BYTES - sum(map(len, first)) - 18 * len(wants)
        rumours = list(first)
        if riders:
            limit = self.settings.transmissions(self.members)
            rumours += self.rumours.take(room - _HEALTH_BYTES, limit)
            room -= sum(map(len, rumours[len(first) :]))
        health: list[bytes] = []
        if kind in (Kind.PING, Kind.ACK, Kind.BEAT) and (own := self.own_health(now)) is not None:
            health = [own, *self._others_health(min(others, (room - _HEALTH_BYTES) // _HEALTH_BYTES), now, receiver)]
        payload = wire.assemble(
            kind,
            seq=seq,
            digest=self.statement.digest,
            rumours=rumours,
            health=health,
            subject=subject,
            wants=wants,
            round_=round_,
        )
        self.effects.append(Send(to, payload))
