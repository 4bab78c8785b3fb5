"""SWIM's failure detector: one member a period, directly, then through others and over TCP at once, then a verdict.

Owns the probe under way, the probes it makes for others, and the choice of targets. Targets go round a ring: in round k a node
probes the live member k places after it by id, and rounds are kept in step by pings that carry k (`ring.py`). So every member
is probed exactly once a period, each time by somebody else; with SWIM's independent random order it is nobody's turn for 4 s
after one death in a hundred (simulated, 40 nodes). Members that others accuse jump the queue now and then, so that a
suspicion is confirmed or refuted soon. Calls ``accuse`` at most once a period and knows nothing of what follows from it.

When our own health is in doubt the verdict waits longer, the next probe does not: where half a room loses its power at once
a detector that waits with both needs a minute to notice (simulated).

A member's own packets spare it a verdict, since it may hear us badly; but only once it has answered something that this run of
ours asked. The window of counters that refuses replays starts empty with each of our runs, so a device that died long ago could
else be kept alive by whoever recorded it.

A ping is repeated until answered, each repetition under its own sequence number (so a late answer still measures the right
round trip) and to the next of the member's addresses (so one dead interface costs 125 ms).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshd.gossip.effects import Check
from meshd.gossip.member import Record
from meshd.gossip.membership import Rank
from meshd.gossip.room import Room
from meshd.gossip.wire import Accusation, Datagram, Kind, Word, pack_accusation
from meshd.vocabulary import Endpoint, NodeId

_MAX_RELAYS: Final = 256
_VERIFIERS: Final = 3.0  # how many of the room look into a suspicion at once, on average


@dataclass(slots=True)
class _Probe:
    """``number`` names it in timers."""

    number: int
    target: NodeId
    started: float
    repeat: int = 0
    helpers: int = 0
    nacks: int = 0


@dataclass(frozen=True, slots=True)
class _Relay:
    target: NodeId
    reply_to: Endpoint
    their_seq: int


class SwimDetector:
    """Timer keys ``("probe", None)``, ``("repeat" | "late" | "verdict", number)`` and ``("relay", seq)`` are its own."""

    def __init__(self, room: Room, accuse: Callable[[Record, float], None]) -> None:
        self._room = room
        self._accuse = accuse
        self._accused_at = -1e9
        self._urgent: deque[NodeId] = deque(maxlen=8)
        self._probes: dict[int, _Probe] = {}
        self._pings: dict[int, tuple[_Probe, float]] = {}  # sequence number -> whose ping, when sent
        self._relays: dict[int, _Relay] = {}
        self._seq = room.rng.randrange(1 << 32)  # nobody has recorded an answer to it

    def start(self, now: float) -> None:
        """Begin at a random phase, so that a room powered up together does not probe in step."""
        self._room.timers.set(("probe", None), now + self._room.rng.random() * self._room.settings.period_s)

    def accused(self, record: Record) -> None:
        """Somebody else accuses it: perhaps look for ourselves next."""
        others = max(1, self._room.live_peers - 1)
        if (
            self._room.settings.verify_suspicions
            and record.node_id not in self._urgent
            and self._room.rng.random() < _VERIFIERS / others
        ):
            self._urgent.append(record.node_id)

    def abandon(self, now: float) -> None:
        """No verdict on the probes under way: we were away ourselves."""
        for probe in list(self._probes.values()):
            self._finish(probe)
        self._room.timers.set(("probe", None), now + self._room.settings.period_s * self._room.rng.random())

    # --- timers

    def timer(self, key: tuple[str, object], now: float) -> None:
        stage, number = key
        if stage == "probe":
            self._begin(now)
        elif stage == "relay":
            self._give_up(number, now)
        elif isinstance(number, int) and (probe := self._probes.get(number)) is not None:
            if stage == "repeat":
                self._ping(probe, now)
            elif stage == "late":
                self._ask_others(probe, now)
            else:
                self._judge(probe, now)

    def _begin(self, now: float) -> None:
        settings, timers = self._room.settings, self._room.timers
        timers.set(("probe", None), now + settings.period_s)
        target = self._choose()
        if target is None:
            return
        number = self._next_seq()
        self._probes[number] = probe = _Probe(number, target.node_id, now)
        timers.set(("late", number), now + settings.ping_timeout_s)
        timers.set(("verdict", number), now + settings.verdict_s + settings.period_s * self._room.awareness.score)
        self._ping(probe, now)

    def _choose(self) -> Record | None:
        while self._urgent:
            if (record := self._probeable(self._urgent.popleft())) is not None:
                return record
        for _ in range(len(self._room.records)):
            chosen = self._room.ring.next()
            if chosen is not None and (record := self._probeable(chosen)) is not None:
                return record
        return None

    def _probeable(self, node_id: NodeId) -> Record | None:
        record = self._room.records.get(node_id)
        return record if record is not None and record.live and record.incompatible is None else None

    def _ping(self, probe: _Probe, now: float) -> None:
        settings = self._room.settings
        record = self._room.records.get(probe.target)
        endpoints = record.endpoints() if record is not None else []
        if record is not None and endpoints:
            seq = self._next_seq()
            self._pings[seq] = (probe, now)
            self._room.send(
                Kind.PING,
                endpoints[probe.repeat % len(endpoints)],
                now,
                seq=seq,
                first=self._accusation(record),
                receiver=record.node_id,
                others=settings.health_others if probe.repeat == 0 else 0,
                round_=self._room.ring.round,
            )
        probe.repeat += 1
        if probe.repeat < len(settings.ping_repeats_s):
            self._room.timers.set(("repeat", probe.number), probe.started + settings.ping_repeats_s[probe.repeat])

    def _accusation(self, record: Record) -> list[bytes]:
        """What a suspect is told with each ping, so that it can answer to that."""
        b = record.belief
        if b.rank is not Rank.SUSPECT:
            return []
        return [pack_accusation(Accusation(record.node_id, b.epoch, b.incarnation, self._room.node_id))]

    def _ask_others(self, probe: _Probe, now: float) -> None:
        settings = self._room.settings
        record = self._room.records.get(probe.target)
        if record is None:
            return
        if settings.tcp_check:
            self._room.effects.append(Check(record.node_id, tuple(record.endpoints())))
        for helper in self._room.some(settings.helpers, but=record.node_id, suspects=False):
            probe.helpers += 1
            seq = self._next_seq()
            self._pings[seq] = (probe, now)
            self._room.send(Kind.PING_REQ, helper.endpoints()[0], now, seq=seq, subject=record.node_id)

    def _judge(self, probe: _Probe, now: float) -> None:
        allowed = self._accused_at + self._room.settings.period_s
        if now < allowed:
            self._room.timers.set(("verdict", probe.number), allowed)
            return
        record = self._room.records.get(probe.target)
        self._finish(probe)
        if record is None or not record.live:
            return
        if record.answered and record.last_heard_at is not None and record.last_heard_at >= probe.started:
            record.direct_failures += 1  # it is there, our datagrams or its answers are not
            return
        if probe.nacks < probe.helpers or not probe.helpers:
            self._room.awareness.change(1)  # not even the helpers answered: perhaps it is us
        self._accused_at = now
        self._accuse(record, now)

    def _finish(self, probe: _Probe) -> None:
        del self._probes[probe.number]
        for stage in ("repeat", "late", "verdict"):
            self._room.timers.cancel((stage, probe.number))
        self._pings = {seq: ping for seq, ping in self._pings.items() if ping[0] is not probe}

    def _succeed(self, probe: _Probe) -> None:
        self._room.awareness.change(-1)
        self._finish(probe)

    # --- datagrams and reports

    def received(self, datagram: Datagram, sender: NodeId, source: Endpoint, now: float) -> None:
        match datagram.kind:
            case Kind.PING:
                if datagram.round is not None:
                    self._room.ring.heard(datagram.round)
                self._answer(datagram, sender, source, now)
            case Kind.ACK:
                self._answered(datagram.seq, sender, now)
            case Kind.PING_REQ if datagram.subject is not None:
                self._help(datagram.subject, datagram.seq, source, now)
            case Kind.RELAYED if (probe := self._asked(datagram)) is not None:
                self._vouched(probe)
            case Kind.NACK if (probe := self._asked(datagram)) is not None:
                probe.nacks += 1
            case _:
                pass

    def vouched(self, node_id: NodeId) -> None:
        """TCP reached it: no verdict on it, but the direct way of datagrams is in doubt."""
        for probe in [p for p in self._probes.values() if p.target == node_id]:
            self._vouched(probe)

    def _vouched(self, probe: _Probe) -> None:
        if (record := self._room.records.get(probe.target)) is not None:
            record.direct_failures += 1
        self._succeed(probe)

    def _asked(self, datagram: Datagram) -> _Probe | None:
        """The probe that a helper's answer belongs to."""
        probe, _ = self._pings.get(datagram.seq, (None, 0.0))
        return probe if probe is not None and probe.target == datagram.subject else None

    def _answer(self, datagram: Datagram, sender: NodeId, source: Endpoint, now: float) -> None:
        introduced = any(isinstance(r, Word) and r.advert is not None for r in datagram.rumours)
        first = [self._room.own_word(advert=True)] if introduced or sender not in self._room.records else []
        self._room.send(Kind.ACK, source, now, seq=datagram.seq, first=first, receiver=sender)

    def _answered(self, seq: int, sender: NodeId, now: float) -> None:
        relay = self._relays.get(seq)
        if relay is not None and relay.target == sender:
            del self._relays[seq]
            self._room.timers.cancel(("relay", seq))
            self._room.send(Kind.RELAYED, relay.reply_to, now, seq=relay.their_seq, subject=sender)
        probe, sent_at = self._pings.get(seq, (None, 0.0))
        if probe is not None and probe.target == sender:
            record = self._room.records[sender]
            record.measured(now - sent_at)
            record.direct_failures = 0
            self._succeed(probe)

    def _help(self, target: NodeId, their_seq: int, source: Endpoint, now: float) -> None:
        record = self._room.records.get(target)
        endpoints = record.endpoints() if record is not None else []
        if record is None or not endpoints or len(self._relays) >= _MAX_RELAYS:
            self._room.send(Kind.NACK, source, now, seq=their_seq, subject=target)
            return
        for endpoint in endpoints[:2]:
            seq = self._next_seq()
            self._relays[seq] = _Relay(target, source, their_seq)
            self._room.timers.set(("relay", seq), now + self._room.settings.nack_after_s)
            self._room.send(Kind.PING, endpoint, now, seq=seq, first=self._accusation(record), receiver=target)

    def _give_up(self, seq: object, now: float) -> None:
        relay = self._relays.pop(seq, None) if isinstance(seq, int) else None
        if relay is not None:
            self._room.send(Kind.NACK, relay.reply_to, now, seq=relay.their_seq, subject=relay.target)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq
