"""Rounds of rumours: while there is news, a few members at random hear some of it every tenth of a period.

Timer key ``("spread", None)`` is its own. Without anybody to tell it waits a period, and does not spin.
"""

from __future__ import annotations

from typing import Final

from meshd.gossip.room import Room
from meshd.gossip.wire import Kind

_FIRST_SHARE: Final = 0.2  # of a round's length: what happens together is told together


class Spreader:
    """Sends what `Rumours` has."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._audience_at = 0.0

    def arm(self, now: float) -> None:
        """There may be news."""
        if len(self._room.rumours) and now >= self._audience_at:
            self._room.timers.set_earlier(("spread", None), now + self._room.settings.spread_s * _FIRST_SHARE)

    def timer(self, now: float) -> None:
        audience = self._room.some(self._room.settings.fanout)
        if not audience:
            self._audience_at = now + self._room.settings.period_s
            self._room.timers.set(("spread", None), self._audience_at)
            return
        for record in audience:
            if len(self._room.rumours):
                self._room.send(Kind.NEWS, record.endpoints()[0], now)
        if len(self._room.rumours):
            self._room.timers.set(("spread", None), now + self._room.settings.spread_s)

    def everybody(self, word: bytes, now: float) -> None:
        """Tell all members something directly."""
        for record in self._room.talkable():
            for endpoint in record.endpoints()[:2]:
                self._room.send(Kind.NEWS, endpoint, now, first=[word], riders=False)
