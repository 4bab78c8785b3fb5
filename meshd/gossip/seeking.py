"""Finding others: candidates that did not answer yet, and the dead, who may be back. Oftener while we are alone.

Timer key ``("reconnect", None)`` is its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from meshd.gossip.candidates import Candidates
from meshd.gossip.defence import Defence
from meshd.gossip.effects import Exchange
from meshd.gossip.membership import Rank
from meshd.gossip.room import Room
from meshd.gossip.wire import Kind
from meshd.vocabulary import Endpoint, NodeId

_DIALS: Final = 2  # links dialled for candidates at once; datagrams go to all of them
_GREETINGS: Final = 8  # candidates tried a turn
_DIAL_SHARE: Final = 0.25  # how often a turn also dials one, where datagrams may not pass


class Seeker:
    """Greets addresses; whoever lives there answers."""

    def __init__(self, room: Room, defence: Defence) -> None:
        self._room = room
        self._defence = defence
        self.candidates = Candidates()

    def start(self, now: float) -> None:
        self._room.timers.set(("reconnect", None), now + self._room.settings.reconnect_s * self._room.rng.random())

    def join(self, endpoints: Iterable[Endpoint], via: str, now: float) -> None:
        """Try what is new of these, unless a live member is known to be there."""
        met = self._met()
        new = [e for e in self.candidates.add(endpoints, via) if e not in met]
        for endpoint in new:
            self._greet(endpoint, now)
        for endpoint in new[:_DIALS]:
            self._room.effects.append(Exchange(None, (endpoint,)))
        if new and not self._room.live_peers:
            self._room.timers.set_earlier(("reconnect", None), now + self._room.settings.period_s)

    def timer(self, now: float) -> None:
        """One of the dead, and some of the candidates nobody answers at."""
        alone = self._room.live_peers == 0
        settings = self._room.settings
        self._room.timers.set(("reconnect", None), now + (settings.period_s if alone else settings.reconnect_s))
        self._try_dead(now)
        unmet = self.candidates.unmet(self._met(), self._lives)
        for endpoint in self._room.rng.sample(unmet, min(_GREETINGS, len(unmet))):
            self._greet(endpoint, now)
        if unmet and (alone or self._room.rng.random() < _DIAL_SHARE):
            self._room.effects.append(Exchange(None, (self._room.rng.choice(unmet),)))

    def _lives(self, node_id: NodeId) -> bool:
        record = self._room.records.get(node_id)
        return record is not None and record.live

    def _met(self) -> set[Endpoint]:
        return {e for r in self._room.records.values() if r.live for e in r.endpoints()}

    def _try_dead(self, now: float) -> None:
        dead = [r for r in self._room.records.values() if r.belief.rank is Rank.DEAD]
        if not dead:
            return
        record = self._room.rng.choice(dead)
        for endpoint in record.endpoints()[:3]:
            self._greet(endpoint, now)
        self._defence.tell(record, now)
        if self._room.rng.random() < 0.5:
            self._room.effects.append(Exchange(record.node_id, tuple(record.endpoints())))

    def _greet(self, endpoint: Endpoint, now: float) -> None:
        """A ping to an address whose owner we may not know, with everything about us."""
        self._room.send(Kind.PING, endpoint, now, first=[self._room.own_word(advert=True)], riders=False)
