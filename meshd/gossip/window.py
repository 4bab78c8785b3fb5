"""The reference detector: everybody sends everybody a heartbeat each period; silent for a window is dead.

Simple, exact, and N datagrams a node a period: it is here to be compared with. Its verdicts are this node's own: they are not
told to anybody, and any packet of the member itself takes them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshd.gossip.member import Record
from meshd.gossip.membership import Rank
from meshd.gossip.room import Room
from meshd.gossip.wire import Datagram, Kind
from meshd.vocabulary import Endpoint, NodeId


class WindowDetector:
    """Timer keys ``("probe", None)`` are its own."""

    def __init__(self, room: Room, judged: Callable[[Record, Rank, float], None]) -> None:
        self._room = room
        self._judged = judged

    def start(self, now: float) -> None:
        self._room.timers.set(("probe", None), now + self._room.rng.random() * self._room.settings.period_s)

    def accused(self, record: Record) -> None:
        """Nothing to look into: its own silence decides."""

    def abandon(self, now: float) -> None:
        """We were away: everybody gets a fresh window."""
        for record in self._room.records.values():
            if record.last_heard_at is not None:
                record.last_heard_at = max(record.last_heard_at, now - self._room.settings.period_s)

    def vouched(self, node_id: NodeId) -> None:
        """Hearsay does not count here."""

    def timer(self, _key: tuple[str, object], now: float) -> None:
        settings = self._room.settings
        self._room.timers.set(("probe", None), now + settings.period_s)
        for record in list(self._room.records.values()):
            if record.incompatible is None and record.belief.rank is not Rank.LEFT:
                self._judge(record, now)
                for endpoint in record.endpoints()[:1]:
                    self._room.send(Kind.BEAT, endpoint, now, receiver=record.node_id)

    def received(self, datagram: Datagram, sender: NodeId, source: Endpoint, now: float) -> None:
        record = self._room.records.get(sender)
        if record is not None and record.belief.rank in (Rank.SUSPECT, Rank.DEAD):
            record.belief = replace(record.belief, accusers=())
            self._judged(record, Rank.ALIVE, now)
        if datagram.kind is Kind.PING:
            self._room.send(Kind.ACK, source, now, seq=datagram.seq, first=[self._room.own_word(advert=True)])

    def _judge(self, record: Record, now: float) -> None:
        settings = self._room.settings
        silent_s = now - (record.last_heard_at if record.last_heard_at is not None else record.since)
        if record.belief.rank is Rank.ALIVE and silent_s >= settings.window_suspect_s:
            self._judged(record, Rank.SUSPECT, now)
        elif record.belief.rank is Rank.SUSPECT and silent_s >= settings.window_s:
            self._judged(record, Rank.DEAD, now)
