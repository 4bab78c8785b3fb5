"""The gossip core: who is in the room, how they stand, and what is to be sent next. Pure.

``receive``, ``tick`` and the reports return effects; ``deadline()`` says when to call ``tick``; ``now`` is monotonic seconds.
It joins the parts: `roster` (beliefs), `owner` (our own word), `detector` or `window` (probes), `spreading` and `pushpull`
(news), `asking` (what is missing), `defence` (accusations between two), `guard` (whose fault is silence), `seeking` (whom to
try). It knows no socket, clock, key or link.

What counts as what:

* only a packet of a member itself, or traffic its link answered (`heard`), says when it was last heard;
* only its own signed statement lifts an accusation; whoever hears from somebody accused tells it so, and it answers;
* addresses are hints, a sealed datagram's sender is a fact.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from meshd.directory import Member
from meshd.errors import BadDatagram
from meshd.gossip import health_wire, wire
from meshd.gossip.asking import Asking
from meshd.gossip.defence import Defence
from meshd.gossip.detector import SwimDetector
from meshd.gossip.effects import Changed, Effect, Event, Exchange
from meshd.gossip.member import Record
from meshd.gossip.membership import Rank
from meshd.gossip.owner import Owner
from meshd.gossip.pushpull import PushPull
from meshd.gossip.room import Room
from meshd.gossip.roster import Roster
from meshd.gossip.seeking import Seeker
from meshd.gossip.settings import GossipSettings
from meshd.gossip.spreading import Spreader
from meshd.gossip.statement import Sign, Verify
from meshd.gossip.window import WindowDetector
from meshd.gossip.wire import Accusation, Datagram, Jam, Kind, Rumour, Word
from meshd.vocabulary import Advert, Endpoint, Health, NodeId, NodeStatus


class GossipCore:
    """One node's membership. ``sign`` and ``verify`` are handed in, as is the randomness."""

    def __init__(
        self,
        advert: Advert,
        settings: GossipSettings,
        *,
        sign: Sign,
        verify: Verify,
        rng: Random,
        now: float,
    ) -> None:
        self.settings = settings
        self.node_id = advert.node_id
        self._room = Room(advert.node_id, settings, rng, now)
        self._owner = Owner(self._room, advert, sign, now)
        self._detector: SwimDetector | WindowDetector
        self._roster = Roster(self._room, verify, joined=self._joined, accused=self._accused)
        if settings.detector == "swim":
            self._detector = SwimDetector(self._room, self._accuse)
        else:
            self._detector = WindowDetector(self._room, self._roster.judged)
        self._pushpull = PushPull(self._room, self._owner, self._roster, verify)
        self._asking = Asking(self._room)
        self._defence = Defence(self._room, self._owner)
        self._seeker = Seeker(self._room, self._defence)
        self._spreader = Spreader(self._room)
        self._health = Health()
        self._detector.start(now)
        self._seeker.start(now)
        self._room.timers.set(("push-pull", None), now + settings.push_pull_s * (0.5 + rng.random()))
        self._room.guard.expects(self.deadline())

    # --- what the shell asks

    def deadline(self) -> float:
        """When ``tick`` wants to run. ``tick(deadline())`` always gets past it."""
        return self._room.timers.deadline()

    @property
    def live_peers(self) -> int:
        """Alive or suspect members, this node not counted."""
        return self._room.live_peers

    @property
    def advert(self) -> Advert:
        """Our own, with its present incarnation."""
        return self._owner.advert

    @property
    def forged(self) -> int:
        """Statements dropped because they were not signed by whom they were about."""
        return self._roster.forged

    def members(self, now: float) -> list[Member]:
        """Everybody known, this node first."""
        me = Member(
            advert=self._owner.advert,
            state=NodeStatus.DRAINING if self._owner.advert.draining else NodeStatus.ALIVE,
            health=self._health,
            last_heard_s=0.0,
            via="self",
        )
        known = (record.snapshot(now) for record in self._room.records.values())
        return [me, *(m for m in known if m is not None), *self._asking.incompatible(now, self._via)]

    def state_of(self, node_id: NodeId) -> NodeStatus | None:
        """How one member stands, without the rest of its snapshot; None if unknown."""
        record = self._room.records.get(node_id)
        return None if record is None else NodeStatus(record.belief.rank.name.lower())

    def addresses_of(self, node_id: NodeId) -> tuple[Endpoint, ...]:
        """Where a member can be reached, best first."""
        record = self._room.records.get(node_id)
        return tuple(record.endpoints()) if record is not None else ()

    # --- what the daemon tells

    def join(self, endpoints: Iterable[Endpoint], now: float, *, via: str = "join") -> list[Effect]:
        """Addresses to try, now and for as long as nobody answers there."""
        self._enter(now)
        self._seeker.join(endpoints, via, now)
        return self._done(now)

    def withdraw(self, endpoints: Iterable[Endpoint], *, via: str) -> None:
        """Candidates that went away where they came from (mDNS); says nothing about members."""
        self._seeker.candidates.remove(endpoints, via)

    def set_advert(self, advert: Advert, now: float) -> list[Effect]:
        """Say something new of ourselves; a change of ``draining`` is told to all directly."""
        self._enter(now)
        drained = advert.draining != self._owner.advert.draining
        if advert.addresses != self._owner.advert.addresses:
            self._seeker.candidates.moved()
        if self._owner.change(advert, now) and drained:
            self._spreader.everybody(self._room.own_word(advert=True), now)
        return self._done(now)

    def set_health(self, health: Health, now: float) -> list[Effect]:
        """A new sample; a flip of ``jammed`` is a rumour, the rest rides on pings and acks."""
        self._enter(now)
        flipped = health.jammed != self._health.jammed
        self._health = health
        self._room.set_health(health, now)
        own = self._room.own_health(now)
        if flipped and own is not None:
            self._room.rumours.add(self.node_id, "jam", wire.pack_jam(own))
        return self._done(now)

    def leave(self, now: float) -> list[Effect]:
        """Tell everybody directly that we go. Call it two or three times, 100 ms apart: datagrams get lost."""
        self._enter(now)
        self._owner.leave(now)
        self._spreader.everybody(self._room.own_word(advert=False), now)
        return self._done(now)

    def heard(self, node_id: NodeId, now: float) -> list[Effect]:
        """Its link answered: as good as a packet from it."""
        self._enter(now)
        record = self._room.records.get(node_id)
        if record is not None:
            self._answered(record, now)
        return self._done(now)

    def lost(self, node_id: NodeId, now: float) -> list[Effect]:
        """A hop to it failed: a suspicion at once, which it hears of at once."""
        self._enter(now)
        record = self._room.records.get(node_id)
        if record is not None and record.live:
            if self.settings.detector == "swim":
                self._roster.accuse(record, now)
            elif record.belief.rank is Rank.ALIVE:
                self._roster.judged(record, Rank.SUSPECT, now)
            self._defence.tell(record, now)
        return self._done(now)

    def checked(self, node_id: NodeId, ok: bool, now: float) -> list[Effect]:
        """The outcome of a `Check`."""
        self._enter(now)
        record = self._room.records.get(node_id)
        if ok and record is not None:
            self._detector.vouched(node_id)
            self._answered(record, now)
        return self._done(now)

    def resumed(self, gap_s: float, now: float) -> list[Effect]:
        """The device slept for ``gap_s`` although our clock may not have noticed."""
        self._enter(now)
        self._pause(gap_s, now)
        return self._done(now)

    def met(self, endpoint: Endpoint, node_id: NodeId) -> None:
        """That node answered there, whether it tells that address or not."""
        self._seeker.candidates.answered(endpoint, node_id)

    def echo(self, source: Endpoint) -> None:
        """One of our own datagrams came back from there: that address is ours."""
        self._seeker.candidates.ours(source)

    def cloned(self, source: Endpoint, now: float) -> list[Effect]:
        """Somebody with our key, in another run, speaks from there."""
        self._enter(now)
        self._defence.conflict([source], now)
        return self._done(now)

    # --- time

    def tick(self, now: float) -> list[Effect]:
        """Everything whose time has come."""
        self._enter(now)
        for key in self._room.timers.due(now):
            self._fire(key, now)
        return self._done(now)

    def _fire(self, key: tuple[str, object], now: float) -> None:
        kind, subject = key
        if kind == "spread":
            self._spreader.timer(now)
        elif kind in ("probe", "repeat", "late", "verdict", "relay"):
            self._detector.timer(key, now)
        elif kind == "suspect":
            self._roster.suspicion_over(NodeId(str(subject)), now)
        elif kind == "push-pull":
            self._start_exchange(now)
        elif kind == "reconnect":
            self._seeker.timer(now)
            for record in self._asking.silent_foreigners(now):
                self._accuse(record, now)
        elif kind == "forget":
            self._roster.forgotten(NodeId(str(subject)))
        elif kind == "advert":
            self._owner.timer(now)

    def _enter(self, now: float) -> None:
        gap = self._room.guard.entered(now)
        if gap:
            self._pause(gap, now)

    def _done(self, now: float) -> list[Effect]:
        self._spreader.arm(now)
        self._room.guard.expects(max(now, self.deadline()))
        effects, self._room.effects = self._room.effects, []
        return effects

    def _pause(self, gap: float, now: float) -> None:
        """We did not run: nobody's silence meanwhile means anything. Ask first."""
        self._detector.abandon(now)
        self._room.awareness.change(1)
        if gap >= self.settings.tombstone_s:
            self._roster.doubt()
        self._regain(gap, now)
        self._room.effects.append(Event("pause", self.node_id, self._owner.advert.name, {"gap_s": round(gap, 3)}))

    def _regain(self, gap: float, now: float) -> None:
        """After isolation or a pause: suspicions get the time back, ours are no longer told, push-pull comes first."""
        self._roster.give_time(gap)
        self._room.rumours.drop_label(self.node_id)
        self._room.timers.set(("push-pull", None), now)

    # --- datagrams

    def receive(self, payload: bytes, sender: NodeId, source: Endpoint, now: float) -> list[Effect]:
        """One opened datagram. Raises BadDatagram if it cannot be read; nothing has changed then."""
        datagram = wire.decode_untrusted(payload)
        self._enter(now)
        if sender == self.node_id:
            return self._done(now)
        if not wire.understands(datagram.wire):
            self._asking.foreign(datagram.wire, sender, source, now)
            self._room.effects.append(Changed())
            return self._done(now)
        for rumour in datagram.rumours:
            self._rumour(rumour, source, now)
        for health in datagram.health:
            self._room.heard_health(health, now)
        record = self._room.records.get(sender)
        if record is None:
            self._asking.ask_stranger(sender, source, now)
        else:
            self._spoke(record, datagram, source, now)
        self._detector.received(datagram, sender, source, now)
        if datagram.kind is Kind.PULL:
            self._asking.give(datagram.wants, source, now)
        return self._done(now)

    def _spoke(self, record: Record, datagram: Datagram, source: Endpoint, now: float) -> None:
        record.wire_seen = None
        statement = record.belief.statement
        current = statement is not None and statement.digest == datagram.digest
        if current or record.source is None:
            record.source = source
        if not current or record.wants_advert:
            self._asking.ask(record, source, now)
        self._alive(record, now)

    def _answered(self, record: Record, now: float) -> None:
        """Over a link, whose handshake nobody can have recorded."""
        record.answered = True
        self._alive(record, now)

    def _alive(self, record: Record, now: float) -> None:
        """A packet of its own, or of its link."""
        record.last_heard_at = now
        record.doubted = False
        gap = self._room.guard.heard(now, self._room.live_peers)
        if gap:
            self._regain(gap, now)
        self._defence.tell(record, now)

    def _rumour(self, rumour: Rumour, source: Endpoint, now: float) -> None:
        match rumour:
            case Word():
                self._word(rumour, source, now)
            case Accusation() if rumour.subject == self.node_id:
                self._defence.answer(rumour, source, now)
            case Accusation():
                self._roster.heard_accusation(rumour, now)
            case Jam():
                self._jam(rumour, now)

    def _word(self, word: Word, source: Endpoint, now: float) -> None:
        try:
            record = self._pushpull.learn(word, now)
        except BadDatagram:
            return  # counted by the roster; the rest of the datagram is its sender's own
        if record is not None:
            if record.via == "gossip":
                record.via = self._via(source, *record.endpoints())
            if record.wants_advert:
                self._asking.ask(record, source, now)
        self._conflicts([source], now)

    def _conflicts(self, sources: list[Endpoint], now: float) -> None:
        """Somebody spoke in our name."""
        if self._pushpull.conflict:
            self._pushpull.conflict = False
            self._defence.conflict(sources, now)

    def _jam(self, jam: Jam, now: float) -> None:
        """Only a flip is told on: a rumour's age is that of its packing, so an echo of what we told ourselves looks newer."""
        jammed = self._room.jammed(jam.record.who)
        record = self._room.heard_health(jam.record, now)
        if record is None:
            return
        self._room.effects.append(Changed())
        if record.health.jammed != jammed:
            packed = wire.pack_jam(health_wire.head(record.node_id, jam.record.age_s) + record.health_body)
            self._room.rumours.add(record.node_id, "jam", packed)

    def _via(self, *endpoints: Endpoint) -> str:
        return self._seeker.candidates.via(endpoints) or "gossip"

    def _accuse(self, record: Record, now: float) -> None:
        """The detector found it silent."""
        if self._room.guard.isolated_until(now, self._room.live_peers) is None:
            self._roster.accuse(record, now)
            self._defence.tell(record, now)

    def _accused(self, record: Record) -> None:
        self._detector.accused(record)

    def _joined(self, record: Record, now: float) -> None:
        """Somebody new, or back. The first one is asked at once whom it knows."""
        self._asking.met(record.node_id)
        if self._room.live_peers == 1:
            self._room.timers.set_earlier(("push-pull", None), now)

    # --- push-pull

    def _start_exchange(self, now: float) -> None:
        self._room.timers.set(("push-pull", None), now + self.settings.push_pull_s * (0.5 + self._room.rng.random()))
        for record in self._room.some(1):
            self._room.effects.append(Exchange(record.node_id, tuple(record.endpoints())))

    def exchange_begin(self) -> bytes:
        """The first message of an `Exchange` we start."""
        return self._pushpull.begin()

    def exchange_reply(self, peer: NodeId, data: bytes, now: float) -> tuple[bytes | None, list[Effect]]:
        """The peer's answer; returns our next message, None when it is over. Raises BadDatagram."""
        return self._exchanged(peer, self._pushpull.reply_untrusted(data, peer, now), now)

    def exchange_serve(self, peer: NodeId, data: bytes, now: float) -> tuple[bytes | None, list[Effect]]:
        """A message of an exchange the peer started; returns our answer. Raises BadDatagram."""
        return self._exchanged(peer, self._pushpull.serve_untrusted(data, peer, now), now)

    def _exchanged(self, peer: NodeId, answer: bytes | None, now: float) -> tuple[bytes | None, list[Effect]]:
        self._enter(now)
        record = self._room.records.get(peer)
        if record is not None:
            self._answered(record, now)
            self._conflicts(record.endpoints()[:1], now)
        if self._pushpull.differed:
            self._pushpull.differed = False
            pause = self.settings.catch_up_s * (0.5 + self._room.rng.random())
            self._room.timers.set_earlier(("push-pull", None), now + pause)
        return answer, self._done(now)
