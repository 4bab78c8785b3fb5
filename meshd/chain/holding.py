"""Which positions of a session a hop holds, and which of them are still guesses. Pure.

A draft window leaves rows behind whose tokens may turn out wrong. The next step over the same hops cuts them off at its start;
a hop that missed that step (it was replaced, cut off, late) still holds them when it is asked again. So the rows behind the
last final one are in doubt, with the ids they were computed from, until a step says which ids are before its start (`recent`).
What does not agree, or cannot be told, counts as not held: it comes again by the one way in which rows come, a Need.

Invariants: ``sure <= have``; doubt is at most one window long; a row before a step's start that this has agreed to is final.
"""

from __future__ import annotations

from meshd.chain.messages import Step


class Holding:
    """Positions ``[0, have)``, those from ``sure`` on in doubt."""

    __slots__ = ("_guess", "have", "sure")

    def __init__(self) -> None:
        self.have = 0
        self.sure = 0
        self._guess: tuple[int, ...] = ()  # ids of the last window's guesses; they end at ``have``

    def reaches(self, step: Step) -> bool:
        """True when everything before the step's start is here and right. What is wrong is let go."""
        known_from = step.start - len(step.recent)
        while self.sure < min(self.have, step.start):
            at = self.sure
            if at < known_from or step.recent[at - known_from] != self._guess[at - self.have]:
                self.lost(at)
                break
            self.sure += 1
        return self.have >= step.start

    def ran(self, step: Step) -> None:
        """The step's rows were computed."""
        self.have, self._guess = step.end, step.guess
        self.sure = step.end - len(step.guess)

    def filled(self, end: int) -> None:
        """Rows that were asked for were computed: they are final, and whatever lay behind them is gone."""
        self.have = self.sure = end
        self._guess = ()

    def lost(self, have: int) -> None:
        """No more than ``have`` positions are here."""
        if have < self.have:
            self._guess = self._guess[: max(0, have - (self.have - len(self._guess)))]
            self.have, self.sure = have, min(self.sure, have)
