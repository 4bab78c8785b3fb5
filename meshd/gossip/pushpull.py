"""The two sides of a push-pull, over our table: see `exchange.py` for the messages.

Keeps no state of a particular exchange; remembers only that one found a difference (so the core makes the next one soon).
"""

from __future__ import annotations

import contextlib

from meshd.errors import BadDatagram
from meshd.gossip import exchange, statement
from meshd.gossip.exchange import Entry, Message, Step
from meshd.gossip.member import Record
from meshd.gossip.membership import Rank
from meshd.gossip.owner import Owner
from meshd.gossip.room import Room
from meshd.gossip.roster import Roster
from meshd.gossip.statement import Verify
from meshd.gossip.wire import Accusation, Word
from meshd.vocabulary import NodeId


class PushPull:
    """Reads and answers; ``differed`` and ``conflict`` are flags for the core to take."""

    def __init__(self, room: Room, owner: Owner, roster: Roster, verify: Verify) -> None:
        self._room = room
        self._owner = owner
        self._roster = roster
        self._verify = verify
        self.differed = False
        self.conflict = False

    def learn(self, word: Word, now: float) -> Record | None:
        """A statement, of somebody or in our own name. Raises BadDatagram."""
        mine = self._room.statement
        if mine is not None and word.statement == mine.encoded:
            return None
        record = self._roster.learn_untrusted(word, now)
        if record is not None:
            record.doubted = False
            return record
        said, body, signature = statement.read_untrusted(word.statement)
        if said.node_id != self._room.node_id:
            return None
        if mine is None or said.version < mine.version or said.encoded == mine.encoded:
            return None
        if self._verify(said.node_id, body, signature):
            self.conflict = True
            if said.epoch == mine.epoch:
                self._owner.outrank(said.incarnation, now)
        return None

    # --- the side that calls

    def begin(self) -> bytes:
        return exchange.encode(Message(Step.SUM, (self._own_word(),), fingerprint=self._fingerprint()))

    def reply_untrusted(self, data: bytes, peer: NodeId, now: float) -> bytes | None:
        """What to say next; None when it is over."""
        message = exchange.decode_untrusted(data, peer)
        self._take(message, now)
        if message.step is not Step.ENTRIES:
            return None
        self.differed = True
        theirs = {entry.node_id: entry.version for entry in message.entries}
        for record in (r for r in self._room.records.values() if r.node_id in theirs):
            record.doubted = False
        ours = dict(self._versions())
        news = [n for n, v in ours.items() if v > theirs.get(n, (-1, -1))]
        wants = [n for n, v in theirs.items() if v > self._version(n) and n != self._room.node_id]
        return exchange.encode(
            Message(Step.NEWS, self._words(news), accusations=self._suspicions(), wants=tuple(wants))
        )

    # --- the side that answers

    def serve_untrusted(self, data: bytes, peer: NodeId, now: float) -> bytes:
        message = exchange.decode_untrusted(data, peer)
        self._take(message, now)
        if message.step is Step.NEWS:
            return exchange.encode(Message(Step.NEWS, self._words(message.wants)))
        if message.step is not Step.SUM:
            raise BadDatagram(f"a push-pull does not begin with {message.step.name}")
        if message.fingerprint == self._fingerprint():
            return exchange.encode(Message(Step.SAME))
        entries = tuple(Entry(node, version) for node, version in self._versions())
        return exchange.encode(
            Message(Step.ENTRIES, (self._own_word(),), entries=entries, accusations=self._suspicions())
        )

    # --- what we have

    def _take(self, message: Message, now: float) -> None:
        for word in message.words:
            with contextlib.suppress(BadDatagram):  # one bad word, counted by the roster, must not stop the others
                self.learn(word, now)
        for accusation in message.accusations:
            if accusation.subject == self._room.node_id:
                if accusation.incarnation >= self._owner.advert.incarnation and not self._owner.left:
                    self._owner.refute(accusation.incarnation, accusation.accuser, now)
            else:
                self._roster.heard_accusation(accusation, now)

    def _own_word(self) -> Word:
        assert self._room.statement is not None  # noqa: S101 - a core has one from the start
        return Word(self._room.statement.encoded, self._room.blob)

    def _fingerprint(self) -> bytes:
        """Equal where two nodes have the same statements of the same live members."""
        assert self._room.statement is not None  # noqa: S101 - as above
        total = int.from_bytes(self._room.statement.digest, "big")
        for record in self._room.records.values():
            if record.live and record.belief.statement is not None and not (record.wants_advert or record.doubted):
                total ^= int.from_bytes(record.belief.statement.digest, "big")
        return total.to_bytes(statement.HASH_BYTES, "big")

    def _versions(self) -> list[tuple[NodeId, tuple[int, int]]]:
        """Whose statements we can give: the living, ourselves, and those who left; nobody that we doubt ourselves."""
        known = [
            (r.node_id, r.belief.statement.version)
            for r in self._room.records.values()
            if r.belief.statement is not None and r.belief.rank is not Rank.DEAD
            if not (r.wants_advert or r.doubted)
        ]
        advert = self._owner.advert
        return [(self._room.node_id, (advert.epoch, advert.incarnation)), *known]

    def _version(self, node_id: NodeId) -> tuple[int, int]:
        record = self._room.records.get(node_id)
        if record is None or record.belief.statement is None:
            return (-1, -1)
        return (record.belief.statement.epoch, record.belief.statement.incarnation - record.wants_advert)

    def _words(self, wanted: list[NodeId] | tuple[NodeId, ...]) -> tuple[Word, ...]:
        words: list[Word] = []
        for node_id in wanted:
            record = self._room.records.get(node_id)
            if node_id == self._room.node_id:
                words.append(self._own_word())
            elif record is not None and record.belief.statement is not None:
                words.append(Word(record.belief.statement.encoded, None if record.wants_advert else record.blob))
        return tuple(words)

    def _suspicions(self) -> tuple[Accusation, ...]:
        return tuple(
            Accusation(r.node_id, r.belief.epoch, r.belief.incarnation, self._room.node_id)
            for r in self._room.records.values()
            if r.belief.rank is Rank.SUSPECT
        )
