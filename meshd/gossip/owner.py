"""What this node says of itself: its advert, its statement, and who may raise its incarnation (only this).

Every change is a new incarnation and so a new signed statement. Progress of loading is told at most every ``progress_s``:
it renews a claim and would otherwise be a rumour a second.
"""

from __future__ import annotations

from dataclasses import replace

from meshd.gossip import advert_wire, statement
from meshd.gossip.effects import Changed, Event
from meshd.gossip.membership import can_have_said
from meshd.gossip.room import Room
from meshd.gossip.statement import Sign, short_hash
from meshd.vocabulary import Advert


class Owner:
    """Keeps ``room.statement`` and ``room.blob``. Timer key ``("advert", None)`` is its own."""

    def __init__(self, room: Room, advert: Advert, sign: Sign, now: float) -> None:
        self._room = room
        self._sign = sign
        self._told_at = now
        self._pending: Advert | None = None
        self.advert = advert
        self.left = False
        self._state(now)

    def change(self, advert: Advert, now: float) -> bool:
        """Take a new advert (its epoch and incarnation are ours to say). True if it was told now."""
        advert = replace(advert, epoch=self.advert.epoch, incarnation=self.advert.incarnation)
        if advert == self.advert:
            self._pending = None
            return False
        if _but_for_progress(advert) == _but_for_progress(self.advert):
            self._pending = advert
            self._room.timers.set_earlier(("advert", None), max(now, self._told_at + self._room.settings.progress_s))
            return False
        self._take(advert, now)
        return True

    def timer(self, now: float) -> None:
        if self._pending is not None:
            self._take(self._pending, now)

    def refute(self, incarnation: int, accuser: str, now: float) -> None:
        """Answer an accusation of ``incarnation``, unless nobody believes it."""
        if not can_have_said(incarnation, self.advert.incarnation):
            return
        self._raise(max(incarnation, self.advert.incarnation) + 1, now)
        self._room.awareness.change(1)
        self._room.effects.append(Event("refute", self.advert.node_id, self.advert.name, {"accuser": accuser}))

    def outrank(self, incarnation: int, now: float) -> None:
        """Somebody else spoke for this run; our word is the newer one."""
        self._raise(incarnation + 1, now)

    def leave(self, now: float) -> None:
        """The last word of this run."""
        if not self.left:
            self.left = True
            self._raise(self.advert.incarnation + 1, now)

    def _take(self, advert: Advert, now: float) -> None:
        newest = self.advert.incarnation  # a refutation may have raised it while ``advert`` waited
        self.advert, self._pending = advert, None
        self._raise(newest + 1, now)
        self._room.effects.append(Changed())

    def _raise(self, incarnation: int, now: float) -> None:
        self.advert = replace(self.advert, incarnation=incarnation)
        self._state(now)

    def _state(self, now: float) -> None:
        room, advert = self._room, self.advert
        blob = advert_wire.encode(advert)
        news = blob != room.blob
        room.blob = blob
        room.statement = statement.make(
            advert.node_id, advert.epoch, advert.incarnation, short_hash(blob), left=self.left, sign=self._sign
        )
        self._told_at = now
        room.rumours.add(advert.node_id, "word", room.own_word(advert=news))


def _but_for_progress(advert: Advert) -> Advert:
    if advert.loading is None:
        return advert
    return replace(advert, loading=replace(advert.loading, progress=0.0))
