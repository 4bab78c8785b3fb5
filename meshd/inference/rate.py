"""Tokens a second over the last seconds: what an engine tells of itself.

Pure; times are monotonic seconds. Adding and asking cost the same however many tokens the window holds: both are done for every
token.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 5.0


class Rate:
    """A count over a sliding window."""

    __slots__ = ("_added", "_sum")

    def __init__(self) -> None:
        self._added: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, count: int, now: float) -> None:
        if count:
            self._added.append((now, count))
            self._sum += count
        self._forget(now)

    def per_s(self, now: float) -> float:
        """Mean over the window."""
        self._forget(now)
        return self._sum / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._added and now > self._added[0][0] + WINDOW_S:
            self._sum -= self._added.popleft()[1]
