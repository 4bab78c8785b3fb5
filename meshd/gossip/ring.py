"""Whose turn it is to probe whom: live members in the order of their ids, and a round number kept in step by gossip.

In round k the member at place p probes the one at place p + 1 + k mod (N - 1). Where all have the same members and the same
round, everybody is probed once a round and never by the same member within N - 1 rounds. Where they differ, the choice is as
good as random, and every member still probes every other within N - 1 of its own rounds.

A round number wraps at 2**16 and is compared like a TCP sequence number, so no datagram can push it out of reach. A node's
turn takes the greater of its own next number and the greatest heard; heard numbers are not counted on from, or two nodes out
of phase would drive each other ever faster.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from random import Random
from typing import Final

from meshd.vocabulary import NodeId

ROUNDS: Final = 1 << 16


class Ring:
    """Knows ids and a number; nothing of time or packets."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._places = [own]
        self._heard = 0
        self.round = 0

    @property
    def others(self) -> int:
        """How many there are beside us."""
        return len(self._places) - 1

    def add(self, node_id: NodeId) -> None:
        place = bisect_left(self._places, node_id)
        if place == len(self._places) or self._places[place] != node_id:
            insort(self._places, node_id)

    def remove(self, node_id: NodeId) -> None:
        place = bisect_left(self._places, node_id)
        if place < len(self._places) and self._places[place] == node_id:
            del self._places[place]

    def shuffled(self, rng: Random, count: int) -> list[NodeId]:
        """Up to ``count`` of the others, at random."""
        drawn = rng.sample(self._places, min(count + 1, len(self._places)))
        return [node_id for node_id in drawn if node_id != self._own][:count]

    def heard(self, round_: int) -> None:
        """A ping said that its sender is in that round."""
        if _later(round_, self._heard):
            self._heard = round_ % ROUNDS

    def next(self) -> NodeId | None:
        """Begin our next round: whom to probe, None while we are alone."""
        mine = (self.round + 1) % ROUNDS
        self.round = self._heard if _later(self._heard, mine) else mine
        if not _later(self._heard, self.round):
            self._heard = self.round
        others = self.others
        if others == 0:
            return None
        place = bisect_left(self._places, self._own)
        return self._places[(place + 1 + self.round % others) % (others + 1)]


def _later(a: int, b: int) -> bool:
    return 0 < (a - b) % ROUNDS < ROUNDS // 2
