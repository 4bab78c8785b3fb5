"""Named deadlines of a pure core: set, cancel, take what is due.

A deadline is stored and compared as it was set (``now >= when``); nothing is ever recomputed from a start and a length, so
taking what is due at ``deadline()`` always takes something. Times are ``now`` seconds of whoever owns the clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """At most one deadline a key. Cancelled and replaced entries leave the heap lazily."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0  # ties fire in the order they were set

    def set(self, key: K, when: float) -> None:
        """Fire ``key`` at ``when`` instead of any earlier choice."""
        self._when[key] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, key))

    def set_earlier(self, key: K, when: float) -> None:
        """Fire ``key`` at ``when`` unless it fires sooner anyway."""
        if when < self._when.get(key, math.inf):
            self.set(key, when)

    def cancel(self, key: K) -> None:
        self._when.pop(key, None)

    def when(self, key: K) -> float | None:
        return self._when.get(key)

    def deadline(self) -> float:
        """The earliest deadline, ``inf`` without one."""
        heap = self._heap
        while heap and self._when.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def due(self, now: float) -> Iterator[K]:
        """Take keys whose time has come, earliest first, including those set meanwhile to a time already past."""
        while self.deadline() <= now:
            key = heapq.heappop(self._heap)[2]
            del self._when[key]
            yield key
