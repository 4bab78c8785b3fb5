"""When an engine begins its next tick, and with whom: at once, or a moment later and in more company. Pure.

A step over eight sessions costs little more than a step over one, but eight answers do not come back as eight steps at the same
instant: an engine that began with the first to arrive would leave seven for the next tick, and so for ever. So it waits, never
longer than a share of what a step takes, and only for what may be expected:

* where sessions come straight back (this node is the whole chain), for those of the last ticks, for twice as long as they usually
  take;
* where they come back by way of other stages, only for the rest of a batch whose first steps have come: a batch travels together.

Somebody who decodes alone is never waited with.

The other way round, sessions that all come at once after this stage had nothing to do for a step or more have made a whole round
together, and stage after stage has worked while the others waited. Then half of them is taken, and the next stage begins with
those while this one computes the rest: from then on two batches alternate and nobody waits.

Knows neither runs nor clocks. Units: seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from typing import Final

SHARE: Final = 0.1  # of a step: the most that is waited for sessions that come straight back
# Of a step, for those that come by way of other stages. A torn batch stays torn, and each part costs a tick nearly as long
# as the whole's: with 0.1 and 0.03 two stages made 150 ticks of 8 sessions' 48 tokens, with these 115, of 96 that would do
# (SmolLM2, two cores; 1.16 times the tokens a second). A node that is the whole chain gained nothing by more.
SHARE_AFAR: Final = 0.25
QUIET: Final = 0.12  # a batch that has brought nobody for so long is complete
RECENT: Final = 3  # ticks
COMPANY: Final = 4.0  # steps: who has not decoded in the last ticks, or for so long since, is gone
NEWEST: Final = 0.2
_MOST_ANSWERED: Final = 1024


class Gathering:
    """Tell it what arrives and what is computed; ask it how long to wait."""

    def __init__(self) -> None:
        self._ticks: deque[frozenset[Hashable]] = deque(maxlen=RECENT)  # who decoded
        self._answered: dict[Hashable, float] = {}
        self._return_s: float | None = None
        self._step_s: float | None = None
        self._ended = float("-inf")
        self._first = self._newest = float("-inf")  # of the steps that came since
        self._waits_since: float | None = None  # when the next tick was first held back

    @property
    def step_s(self) -> float | None:
        """What a tick of decode steps alone takes; None before the first."""
        return self._step_s

    def in_company(self, now: float) -> bool:
        """True while somebody decodes, be it that none of their steps is here at this instant."""
        return any(self._ticks) and self._step_s is not None and now - self._ended <= COMPANY * self._step_s

    def arrived(self, session: Hashable, at: float) -> None:
        """A decode step came."""
        self._first = at if self._first <= self._ended else self._first
        self._newest = at
        answered = self._answered.pop(session, None)
        if answered is not None:
            self._return_s = _newer(self._return_s, max(0.0, at - answered))

    def ticked(self, sessions: Collection[Hashable], now: float, took_s: float, *, alone: bool) -> None:
        """A tick is over in which these sessions decoded. ``alone``: no chunk of a long run was in it."""
        self._ticks.append(frozenset(sessions))
        self._ended, self._waits_since = now, None
        if sessions and alone:
            self._step_s = _newer(self._step_s, took_s)
        for session in sessions:
            self._answered[session] = now
        while len(self._answered) > _MOST_ANSWERED:  # ended ones never come back
            del self._answered[next(iter(self._answered))]

    def share(self, now: float, waiting: int) -> int:
        """How many of the decode steps that are here to take in the tick that begins ``now``."""
        if self._step_s is None or self._return_s is None or waiting < 2:
            return waiting
        idle = now - self._ended >= self._step_s <= self._return_s
        return -(-waiting // 2) if idle and waiting >= len(frozenset[Hashable]().union(*self._ticks)) else waiting

    def wait_s(self, now: float, waiting: int) -> float:
        """How long to wait for more while ``waiting`` decode steps are here; 0: begin."""
        if self._step_s is None or self._return_s is None:
            return 0.0
        most_s = SHARE * self._step_s
        if self._return_s <= most_s:
            expected = len(frozenset[Hashable]().union(*self._ticks))
            until = self._ended + min(most_s, 2.0 * self._return_s)
        else:
            most_s = SHARE_AFAR * self._step_s
            expected = max(map(len, self._ticks))
            until = min(self._newest + QUIET * self._step_s, self._first + most_s) if waiting else now
        if waiting >= expected or until <= now:
            return 0.0
        # What arrives meanwhile changes what is expected, and so `until`; all of it together stays within the share.
        self._waits_since = now if self._waits_since is None else self._waits_since
        return max(0.0, min(until, self._waits_since + most_s) - now)


def _newer(old: float | None, new: float) -> float:
    return new if old is None else old + NEWEST * (new - old)
