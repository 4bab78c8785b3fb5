"""Whether this node hands its work over, and why: it was told to, or its battery runs out. Pure.

Off mains and below ``below_pct`` in two samples in a row a node drains; back on mains, or `BACK_PCT` points above, it takes work
again, so that a charge at the edge does not flicker. Only the crossing counts: a node that was told to resume on a low battery
serves until it crosses again, and a recovered battery does not end a drain that somebody ordered. A device that knows nothing of
a battery or of mains never drains for it.
"""

from __future__ import annotations

from typing import Final

from meshd.vocabulary import Health

BACK_PCT: Final = 5
_SAMPLES: Final = 2


class Draining:
    """``below_pct`` 0: never for the battery."""

    def __init__(self, below_pct: int) -> None:
        self._below_pct = below_pct
        self._ordered = False
        self._battery = ""
        self._low = False
        self._against = 0  # samples in a row that speak against `_low`

    @property
    def reason(self) -> str:
        """Why it drains; "" while it does not."""
        return "told to" if self._ordered else self._battery

    def order(self) -> None:
        """Somebody wants it to."""
        self._ordered = True

    def resume(self) -> None:
        """Somebody wants it to take work, whatever the battery says."""
        self._ordered, self._battery = False, ""

    def sample(self, health: Health) -> bool:
        """Look at the battery; True when `reason` changed."""
        before = self.reason
        self._against = self._against + 1 if self._is_low(health) != self._low else 0
        if self._against >= _SAMPLES:
            self._low, self._against = not self._low, 0
            self._battery = f"battery at {health.battery_pct} %, not on mains" if self._low else ""
        return self.reason != before

    def _is_low(self, health: Health) -> bool:
        if health.battery_pct is None or health.on_ac is not False:
            return False
        return health.battery_pct < self._below_pct + (BACK_PCT if self._low and self._below_pct else 0)
