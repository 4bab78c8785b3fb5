"""Lifeguard's local health: how much we distrust our own probes, 0 (healthy) upwards."""

from __future__ import annotations


class Awareness:
    """A score in ``[0, most]``; probes take ``1 + score`` times as long to fail."""

    def __init__(self, most: int, *, enabled: bool) -> None:
        self._most = most if enabled else 0
        self.score = 0

    def change(self, by: int) -> None:
        self.score = max(0, min(self._most, self.score + by))
