"""Statements and adverts on request, and those who are not members yet: strangers.

A digest we do not know is asked for (PULL) and answered (NEWS), some datagrams a request at most. Of a stranger nothing is kept
but where it is and when it was heard; one that speaks a version too far away to be read is shown as such and not answered.
Bounded: `STRANGERS` are remembered, the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from meshd.directory import Member
from meshd.gossip import wire
from meshd.gossip.limits import PAYLOAD_BYTES
from meshd.gossip.member import Record
from meshd.gossip.room import Room
from meshd.gossip.wire import Kind, Word, pack_word
from meshd.vocabulary import Advert, Endpoint, NodeId

STRANGERS: Final = 256
STRANGER_S: Final = 30.0  # silent for that long, one that cannot be read is gone
_AGAIN_PERIODS: Final = 0.25  # a question is not repeated sooner
_DATAGRAMS: Final = 8


@dataclass(slots=True)
class _Stranger:
    source: Endpoint
    heard_at: float
    asked_at: float = -1e9
    wire: int | None = None  # only if too far away


class Asking:
    """Asks, answers, and remembers whom it had to ask."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._strangers: OrderedDict[NodeId, _Stranger] = OrderedDict()
        self._again_s = _AGAIN_PERIODS * room.settings.period_s

    def ask(self, record: Record, source: Endpoint, now: float) -> None:
        """For the newest statement and advert of a member, from whoever seems to have them."""
        if now >= record.asked_at + self._again_s:
            record.asked_at = now
            self._room.send(Kind.PULL, source, now, wants=[record.node_id])

    def ask_stranger(self, sender: NodeId, source: Endpoint, now: float) -> None:
        """Who are you? With who we are."""
        stranger = self._stranger(sender, source, now)
        if now >= stranger.asked_at + self._again_s:
            stranger.asked_at = now
            self._room.send(Kind.PULL, source, now, wants=[sender], first=[self._room.own_word(advert=True)])

    def give(self, wants: Iterable[NodeId], source: Endpoint, now: float) -> None:
        """Statements and adverts, as many a datagram as fit."""
        page: list[bytes] = []
        pages = 0
        for packed in [p for p in (self._packed_word(node) for node in wants) if p is not None]:
            if page and sum(map(len, page)) + len(packed) > PAYLOAD_BYTES - 64:
                self._room.send(Kind.NEWS, source, now, first=page, riders=False)
                page, pages = [], pages + 1
                if pages >= _DATAGRAMS:
                    return
            page.append(packed)
        if page:
            self._room.send(Kind.NEWS, source, now, first=page, riders=False)

    def foreign(self, version: int, sender: NodeId, source: Endpoint, now: float) -> None:
        """A datagram of a version that cannot be read."""
        record = self._room.records.get(sender)
        if record is not None:
            record.wire_seen = version
            record.last_heard_at = now
        else:
            self._stranger(sender, source, now).wire = version

    def met(self, node_id: NodeId) -> None:
        """It is a member now."""
        self._strangers.pop(node_id, None)

    def silent_foreigners(self, now: float) -> list[Record]:
        """Members that cannot be read any more, so are not probed, and have not been heard for long."""
        return [
            r
            for r in self._room.records.values()
            if r.live and r.wire_seen is not None and (r.last_heard_at or 0.0) < now - STRANGER_S
        ]

    def incompatible(self, now: float, via: Callable[[Endpoint], str]) -> list[Member]:
        """Nodes heard lately that cannot be read; all that is known is that they are there."""
        return [
            Member(
                advert=Advert(node_id, node_id[:8], 0, 0, (s.source,), wire=s.wire),
                incompatible=f"speaks wire version {s.wire}, this node {wire.WIRE}",
                last_heard_s=max(0.0, now - s.heard_at),
                via=via(s.source),
                source=s.source,
            )
            for node_id, s in self._strangers.items()
            if s.wire is not None and now - s.heard_at < STRANGER_S
        ]

    def _stranger(self, sender: NodeId, source: Endpoint, now: float) -> _Stranger:
        stranger = self._strangers.setdefault(sender, _Stranger(source, now))
        stranger.source, stranger.heard_at = source, now
        self._strangers.move_to_end(sender)
        while len(self._strangers) > STRANGERS:
            self._strangers.popitem(last=False)
        return stranger

    def _packed_word(self, node_id: NodeId) -> bytes | None:
        if node_id == self._room.node_id:
            return self._room.own_word(advert=True)
        record = self._room.records.get(node_id)
        if record is None or record.belief.statement is None:
            return None
        return pack_word(Word(record.belief.statement.encoded, None if record.wants_advert else record.blob))
