"""Evidence in, states and events out: who is in the room and how each of them stands.

Owns every change of a member's belief, the suspicion that runs on it, the rumour that tells it on, its tombstone and the line
in the event log. Does not know where evidence comes from; signatures are checked here, once for each new statement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from meshd.errors import BadDatagram
from meshd.gossip import statement as statements
from meshd.gossip import suspicion, wire
from meshd.gossip.effects import Changed, Event
from meshd.gossip.member import Record
from meshd.gossip.membership import Belief, Rank, can_have_said, from_accusation, from_statement, merge
from meshd.gossip.room import Room
from meshd.gossip.statement import Statement, Verify
from meshd.gossip.wire import Accusation, Word
from meshd.vocabulary import NodeId

MAX_MEMBERS: Final = 4096


class Roster:
    """Timer keys ``("suspect", id)`` and ``("forget", id)`` are its own."""

    def __init__(
        self,
        room: Room,
        verify: Verify,
        *,
        joined: Callable[[Record, float], None],
        accused: Callable[[Record], None],
    ) -> None:
        self._room = room
        self._verify = verify
        self._joined = joined
        self._accused = accused
        self._newest: dict[bytes, Record] = {}  # by encoded statement: most rumours are old news, cheaply told
        self.forged = 0  # statements whose signature did not hold

    # --- statements

    def learn_untrusted(self, word: Word, now: float, *, via: str = "gossip") -> Record | None:
        """Merge what a node says of itself, from whomever. Returns its record. Raises BadDatagram.

        An advert that cannot be read is not known; the statement counts all the same, for its owner signed it.
        """
        record = self._newest.get(word.statement)
        if record is not None and (word.advert is None or not record.wants_advert):
            return record
        said, body, signature = statements.read_untrusted(word.statement)
        if said.node_id == self._room.node_id:
            return None  # in our own name: not for us to believe
        record = self._room.records.get(said.node_id)
        known = record.belief.statement if record is not None else None
        if record is not None and known is not None and known.version >= said.version:
            if word.advert is not None and known.version == said.version and record.wants_advert:
                self._take_advert(record, word.advert)
            return record
        if not self._verify(said.node_id, body, signature):
            self.forged += 1
            raise BadDatagram(f"a statement in the name of {said.node_id} is not signed by it")
        if record is None:
            return self._newcomer(said, word, now, via)
        before = record.belief
        if known is not None:
            self._newest.pop(known.encoded, None)
        record.belief = merge(before, from_statement(said))
        if said.epoch > before.epoch:
            record.forget_run()
        self._stated(record, word)
        self._settle(record, before, now)
        return record

    def _newcomer(self, said: Statement, word: Word, now: float, via: str) -> Record | None:
        if said.left or len(self._room.records) >= MAX_MEMBERS:
            return None
        record = Record(said.node_id, from_statement(said), now, via=via)
        self._room.admit(record)
        self._room.unaccused += 1
        self._stated(record, word)
        self._joined(record, now)
        self._announce(record)
        return record

    def _stated(self, record: Record, word: Word) -> None:
        self._newest[word.statement] = record
        blob = word.advert if word.advert is not None else record.blob
        if blob is not None and not record.take_blob(blob):
            word = Word(word.statement)
        self._room.rumours.drop(record.node_id)
        self._room.rumours.add(record.node_id, "word", wire.pack_word(word))

    def _take_advert(self, record: Record, blob: bytes) -> None:
        if record.take_blob(blob):
            assert record.belief.statement is not None  # noqa: S101 - take_blob compares with it
            word = Word(record.belief.statement.encoded, blob)
            self._room.rumours.add(record.node_id, "word", wire.pack_word(word))
            self._announce(record)

    # --- accusations

    def accuse(self, record: Record, now: float) -> None:
        """Our own suspicion of a live member."""
        b = record.belief
        if b.live and self._room.node_id not in b.accusers:
            self._merge_accusation(record, Accusation(record.node_id, b.epoch, b.incarnation, self._room.node_id), now)

    def heard_accusation(self, accusation: Accusation, now: float) -> None:
        """Somebody's suspicion or verdict of somebody else."""
        record = self._room.records.get(accusation.subject)
        if record is None or self._room.settings.detector == "window" or self._old_news(record, accusation):
            return
        was_suspect = record.belief.rank is not Rank.ALIVE
        self._merge_accusation(record, accusation, now)
        if record.belief.rank is Rank.SUSPECT and not was_suspect:
            self._accused(record)

    def _old_news(self, record: Record, accusation: Accusation) -> bool:
        """Most accusations are: believed already, or confirmed as often as counts. So is one that cannot be true."""
        b = record.belief
        if not can_have_said(accusation.incarnation, b.statement.incarnation if b.statement is not None else 0):
            return True
        standing = (accusation.epoch, accusation.incarnation, Rank.DEAD if accusation.dead else Rank.SUSPECT)
        if b.standing != standing or accusation.dead:
            return b.standing >= standing
        return accusation.accuser in b.accusers or len(b.accusers) > self._room.settings.confirmations

    def judged(self, record: Record, rank: Rank, now: float) -> None:
        """The window detector's verdict: this node's own, told to nobody."""
        before = record.belief
        record.belief = replace(before, rank=rank)
        self._settle(record, before, now)

    def _merge_accusation(self, record: Record, accusation: Accusation, now: float) -> None:
        before = record.belief
        after = merge(before, from_accusation(accusation))
        if after == before:
            return
        record.belief = after
        self._tell_on(record, before, accusation)
        self._settle(record, before, now)

    def _tell_on(self, record: Record, before: Belief, accusation: Accusation) -> None:
        """A verdict replaces what was told before; of suspicions as many are told as confirm each other."""
        room, after = self._room, record.belief
        if (accusation.epoch, accusation.incarnation) != (after.epoch, after.incarnation):
            return
        if accusation.dead and after.rank is Rank.DEAD and before.standing != after.standing:
            room.rumours.drop(record.node_id)
            room.rumours.add(record.node_id, "dead", wire.pack_accusation(accusation))
        elif after.rank is Rank.SUSPECT and len(after.accusers) <= room.settings.confirmations + 1:
            room.rumours.drop(record.node_id, "word")
            room.rumours.add(record.node_id, accusation.accuser, wire.pack_accusation(accusation))

    # --- timers

    def suspicion_over(self, node_id: NodeId, now: float) -> None:
        """It had its time and stayed silent. While the fault may be ours it gets more."""
        record = self._room.records.get(node_id)
        if record is None or record.belief.rank is not Rank.SUSPECT:
            return
        until = self._room.guard.isolated_until(now, self._room.live_peers)
        if until is not None:
            self._room.timers.set(("suspect", node_id), until)
            return
        b = record.belief
        verdict = Accusation(node_id, b.epoch, b.incarnation, self._room.node_id, dead=True)
        self._merge_accusation(record, verdict, now)

    def forgotten(self, node_id: NodeId) -> None:
        """Its tombstone is old enough."""
        record = self._room.records.get(node_id)
        if record is not None and record.belief.statement is not None:
            self._newest.pop(record.belief.statement.encoded, None)
        self._room.forget(node_id)
        self._room.effects.append(Changed())

    def give_time(self, by_s: float) -> None:
        """For that long nobody could have answered us: no suspicion ran."""
        for record in self._room.records.values():
            if record.suspicion is not None:
                record.suspicion.started += by_s
                self._time(record)

    def doubt(self) -> None:
        """We were away for so long that whoever went meanwhile is forgotten: what we know of it would bring it back."""
        for record in self._room.records.values():
            record.doubted = True
            self._room.rumours.drop(record.node_id)

    # --- consequences

    def _settle(self, record: Record, before: Belief, now: float) -> None:
        room, after = self._room, record.belief
        if after.rank is not before.rank:
            record.since = now
            room.unaccused += (after.rank is Rank.ALIVE) - (before.rank is Rank.ALIVE)
        if after.rank is Rank.ALIVE and before.rank in (Rank.SUSPECT, Rank.DEAD) and after.epoch == before.epoch:
            record.flapped(now)
        if after.rank is Rank.SUSPECT:
            self._suspect(record, now)
            if room.unaccused <= room.settings.confirmations:
                self._hurry()
        else:
            record.suspicion = None
            room.timers.cancel(("suspect", record.node_id))
        if after.live:
            room.timers.cancel(("forget", record.node_id))
            if not before.live:
                room.ring.add(record.node_id)
                self._joined(record, now)
        elif before.live:
            room.ring.remove(record.node_id)
            room.timers.set(("forget", record.node_id), now + room.settings.tombstone_s)
        self._announce(record)

    def _suspect(self, record: Record, now: float) -> None:
        room = self._room
        if room.settings.detector == "window":
            return
        running = record.suspicion
        if running is None or (room.settings.fresh_timer and running.incarnation != record.belief.incarnation):
            record.suspicion = suspicion.begin(
                room.settings,
                incarnation=record.belief.incarnation,
                now=now,
                members=room.members,
                flaps=record.flaps(now),
            )
        self._time(record)

    def _hurry(self) -> None:
        """Too few are left to confirm anything: what runs need not wait for them."""
        for record in self._room.records.values():
            if record.suspicion is not None:
                self._time(record)

    def _time(self, record: Record) -> None:
        assert record.suspicion is not None  # noqa: S101 - both callers have just looked
        accusers = record.belief.accusers
        heard_already = sum(self._unaccused(node) for node in accusers)
        deadline = record.suspicion.deadline(len(accusers), self._room.unaccused - heard_already)
        self._room.timers.set(("suspect", record.node_id), deadline)

    def _unaccused(self, node_id: NodeId) -> bool:
        record = self._room.records.get(node_id)
        return record is not None and record.belief.rank is Rank.ALIVE

    def _announce(self, record: Record) -> None:
        """One event for each change of run or rank, once the advert (and so the name) of that run is known."""
        advert, b = record.advert, record.belief
        if advert is None:
            return
        self._room.effects.append(Changed())
        shown = record.shown
        if b.live and advert.epoch != b.epoch:
            return
        if shown == (b.epoch, b.rank):
            return
        name = _event(shown, b)
        record.shown = (b.epoch, b.rank)
        if name is not None:
            fields = {"epoch": b.epoch, "incarnation": b.incarnation}
            self._room.effects.append(Event(name, record.node_id, advert.name, fields))


def _event(shown: tuple[int, Rank] | None, b: Belief) -> str | None:
    """What the log calls the step from what it last said to what is so now."""
    seen = shown is not None and shown[1] <= Rank.SUSPECT
    match b.rank:
        case Rank.ALIVE:
            return "refute" if shown == (b.epoch, Rank.SUSPECT) else "join"
        case Rank.SUSPECT:
            return "suspect" if seen else "join"
        case Rank.DEAD:
            return "failed" if seen else None
        case Rank.LEFT:
            return "left" if seen else None
