"""How long an entry waits without progress before it asks, and before it hedges. Pure. Seconds.

Owns what a step and a replayed row of this request have cost so far (at first: what the members claim) and the times that
follow from it. A hedge comes after max(0.6 s, 8 x what was expected), each further one for the same token after twice as long.
"""

from __future__ import annotations

from typing import Final

HEDGE_S: Final = 0.6
HEDGE_FACTOR: Final = 8.0
FEW_ROWS: Final = 64
ASK_AFTER_S: Final = 0.3
ASK_EVERY_S: Final = 0.25
TRIES_LEFT: Final = 4  # a wait takes at most this part of the time that is left


class Patience:
    """``rows`` is always how many rows must be computed before the next progress, beside the one of a plain step."""

    def __init__(self, now: float) -> None:
        self.step_s = 0.0
        self.row_s = 0.0
        self.progress_at = now
        self.ask_at = now
        self.hedge_at = now
        self._factor = 1.0

    @property
    def first(self) -> bool:
        """True at the first suspicion since the last token."""
        return self._factor <= 2.0

    def progressed(self, now: float, rows: int, left_s: float) -> None:
        """Something moved; ``left_s`` remain until the request gives up."""
        self.progress_at = now
        self.ask_at = now + ASK_AFTER_S
        self.hedge_at = now + self._wait_s(rows, left_s)

    def token(self) -> None:
        """A token came: suspicions start anew."""
        self._factor = 1.0

    def asked(self, now: float) -> None:
        self.ask_at = now + ASK_EVERY_S

    def suspected(self, now: float, rows: int, left_s: float) -> None:
        """The hedge's time has come."""
        self._factor *= 2.0
        self.hedge_at = now + self._wait_s(rows, left_s, self._factor)

    def learn_prompt(self, elapsed_s: float, rows: int) -> None:
        """A prompt of ``rows`` rows took that long. Of a short one most was a pass, or a fault, and not its rows."""
        self.row_s = max(self.row_s, elapsed_s / max(FEW_ROWS, rows))

    def learn_step(self, elapsed_s: float) -> None:
        """A plain step took that long."""
        self.step_s = elapsed_s if self.step_s == 0.0 else 0.8 * self.step_s + 0.2 * elapsed_s

    def _wait_s(self, rows: int, left_s: float, factor: float = 1.0) -> float:
        """How long without progress before something is tried: never so long that no time is left for it to work."""
        limit_s = max(HEDGE_S, HEDGE_FACTOR * (self.step_s + rows * self.row_s)) * factor
        return min(limit_s, max(HEDGE_S, left_s / TRIES_LEFT))
