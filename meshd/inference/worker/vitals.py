"""How the worker is, for PONG: written by the computing thread, read by the link's reader thread.

Plain attributes of immutable values, so reading needs no lock. ``tick`` counts turns of the computing loop (an idle loop turns
too): with ``busy_ms`` it tells a long computation from a stuck one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshd.inference.rate import Rate


class Vitals:
    """Counters of one worker. ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy_since: float | None = None
        self._rate = Rate()
        self.tick = 0
        self.queue = 0
        self.sessions = 0
        self.kv_used = 0
        self.kv_total = 0
        self.tokens_per_s = 0.0
        self.runs = 0
        self.rows = 0
        self.need_rows = 0
        self.busy = 0
        self.evicted = 0
        self.failed = 0

    def begin(self) -> None:
        """A computation starts."""
        self._busy_since = self._clock()

    def finish(self) -> None:
        """The computation is over."""
        self._busy_since = None

    def generated(self, tokens: int) -> None:
        """Rows behind the prompt were computed: tokens of answers, over the last seconds."""
        now = self._clock()
        self._rate.add(tokens, now)
        self.tokens_per_s = self._rate.per_s(now)

    def snapshot(self) -> dict[str, Any]:
        """What a PONG carries."""
        since = self._busy_since
        return {
            "tick": self.tick,
            "busy_ms": 0.0 if since is None else max(0.0, self._clock() - since) * 1e3,
            "queue": self.queue,
            "sessions": self.sessions,
            "kv_used": self.kv_used,
            "kv_total": self.kv_total,
            "tokens_per_s": self.tokens_per_s,
            "runs": self.runs,
            "rows": self.rows,
            "need_rows": self.need_rows,
            "busy": self.busy,
            "evicted": self.evicted,
            "failed": self.failed,
        }
