"""How long a suspect has to answer (Lifeguard): long on one word, short when others say the same.

Pure arithmetic on stored times. A suspicion is of one incarnation; a new one gets a new suspicion.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from meshd.gossip.settings import GossipSettings

_FLAPS_FREE = 1.0
_FLAP_STEP = 0.5
_FLAP_MOST = 3.0


@dataclass(slots=True)
class Suspicion:
    """Runs from ``started``; between ``longest_s`` with no and ``shortest_s`` with ``wanted`` confirmations."""

    incarnation: int
    started: float
    shortest_s: float
    longest_s: float
    wanted: int

    def deadline(self, accusers: int, able: int) -> float:
        """When it is dead if that many have accused it and it stays silent; ``able`` others could still confirm it."""
        confirmations = max(0, accusers - 1)
        wanted = min(self.wanted, confirmations + able)
        if confirmations >= wanted:
            return self.started + self.shortest_s
        share = log(confirmations + 1) / log(wanted + 1)
        return self.started + self.longest_s - share * (self.longest_s - self.shortest_s)


def begin(settings: GossipSettings, *, incarnation: int, now: float, members: int, flaps: float) -> Suspicion:
    """The suspicion of one member in a room of ``members`` (ourselves included).

    Where fewer than ``confirmations`` others could confirm, the shortest time holds at once. A member that was wrongly
    accused again and again lately gets up to three times as long: it sits behind a bad radio.
    """
    patience = min(_FLAP_MOST, 1 + _FLAP_STEP * max(0.0, flaps - _FLAPS_FREE)) if settings.flap_damping else 1.0
    shortest = settings.suspicion_min_s(members) * patience
    wanted = settings.confirmations if settings.lifeguard and members >= settings.confirmations + 2 else 0
    return Suspicion(incarnation, now, shortest, shortest * settings.suspicion_max_mult, wanted)
