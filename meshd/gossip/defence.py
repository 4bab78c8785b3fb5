"""Accusations between two: telling somebody what it stands accused of, answering what we do, and two devices with one key.

An accusation that its subject never hears can only end in a wrong verdict, so whoever believes one tells the accused whenever
it hears from it (at most four times a period), and the accused answers to where that came from at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshd.gossip.effects import Event
from meshd.gossip.member import Record
from meshd.gossip.membership import Rank
from meshd.gossip.owner import Owner
from meshd.gossip.room import Room
from meshd.gossip.wire import Accusation, Kind, pack_accusation
from meshd.vocabulary import Endpoint

_AGAIN_PERIODS: Final = 0.25
_CONFLICT_AGAIN_S: Final = 60.0


class Defence:
    """Speaks to the accused, and for ourselves."""

    def __init__(self, room: Room, owner: Owner) -> None:
        self._room = room
        self._owner = owner
        self._conflict_at = -1e9

    def tell(self, record: Record, now: float) -> None:
        """Let it know what it stands accused of, if it does."""
        b, settings = record.belief, self._room.settings
        if (
            not settings.tell_accused
            or b.rank not in (Rank.SUSPECT, Rank.DEAD)
            or now < record.told_at + _AGAIN_PERIODS * settings.period_s
        ):
            return
        record.told_at = now
        dead = b.rank is Rank.DEAD
        accusation = Accusation(record.node_id, b.epoch, b.incarnation, self._room.node_id, dead=dead)
        for endpoint in record.endpoints()[:2]:
            self._room.send(Kind.NEWS, endpoint, now, first=[pack_accusation(accusation)], riders=False)

    def answer(self, accusation: Accusation, source: Endpoint, now: float) -> None:
        """We are accused; whoever told us hears our newest word."""
        if self._owner.left:
            return
        mine = self._owner.advert
        if accusation.epoch > mine.epoch:
            self.conflict([source], now)
            return
        if accusation.epoch == mine.epoch and accusation.incarnation >= mine.incarnation:
            self._owner.refute(accusation.incarnation, accusation.accuser, now)
        self._room.send(Kind.NEWS, source, now, first=[self._room.own_word(advert=False)], riders=False)

    def conflict(self, sources: Sequence[Endpoint], now: float) -> None:
        """Two devices, one key: shown with both addresses, once a minute. What comes from our own address was sent by our former
        run, and has come late."""
        if set(sources) <= set(self._owner.advert.addresses):
            return
        if now >= self._conflict_at + _CONFLICT_AGAIN_S:
            self._conflict_at = now
            addresses = [*map(str, self._owner.advert.addresses[:2]), *map(str, sources)]
            name = self._owner.advert.name
            self._room.effects.append(Event("conflict", self._room.node_id, name, {"addresses": addresses}))
