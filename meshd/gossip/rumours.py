"""News waiting to be told: each rumour is sent a bounded number of times, the least told first.

A rumour has a subject and a label; a newer one with the same pair replaces the older. Holds packed bytes, knows no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshd.vocabulary import NodeId

Key = tuple[NodeId, str]

# When half a room is suspect thousands of rumours wait, almost all of one size: what is left of a datagram is not worth a look
# at each of them.
_MISFITS: Final = 32


class Rumours:
    """A queue in tiers by how often a rumour was sent; newest first within a tier."""

    def __init__(self) -> None:
        self._tiers: list[dict[Key, bytes]] = []
        self._tier_of: dict[Key, int] = {}
        self._labels: dict[NodeId, set[str]] = {}

    def __len__(self) -> int:
        return len(self._tier_of)

    def add(self, subject: NodeId, label: str, packed: bytes) -> None:
        """Start telling; replaces what was told of the same subject under the same label."""
        self._remove((subject, label))
        self._place((subject, label), packed, 0)

    def drop(self, subject: NodeId, label: str | None = None) -> None:
        """Stop telling what is no longer so."""
        for each in [label] if label is not None else sorted(self._labels.get(subject, ())):
            self._remove((subject, each))

    def drop_label(self, label: str) -> None:
        """Stop telling everything under one label."""
        for key in [key for key in self._tier_of if key[1] == label]:
            self._remove(key)

    def take(self, room_bytes: int, limit: int, most: int = 32) -> list[bytes]:
        """Up to ``most`` rumours that fit, each counted as sent once and retired after ``limit`` sends."""
        chosen: list[tuple[Key, bytes, int]] = []
        misfits = 0
        for key, packed, tier in self._least_told():
            if len(packed) <= room_bytes:
                chosen.append((key, packed, tier))
                room_bytes -= len(packed)
            else:
                misfits += 1
            if len(chosen) >= most or misfits >= _MISFITS:
                break
        for key, packed, tier in chosen:
            self._remove(key)
            if tier + 1 < limit:
                self._place(key, packed, tier + 1)
        return [packed for _, packed, _ in chosen]

    def _least_told(self) -> Iterator[tuple[Key, bytes, int]]:
        for tier, rumours in enumerate(self._tiers):
            for key in reversed(rumours):
                yield key, rumours[key], tier

    def _place(self, key: Key, packed: bytes, tier: int) -> None:
        while len(self._tiers) <= tier:
            self._tiers.append({})
        self._tiers[tier][key] = packed
        self._tier_of[key] = tier
        self._labels.setdefault(key[0], set()).add(key[1])

    def _remove(self, key: Key) -> None:
        tier = self._tier_of.pop(key, None)
        if tier is None:
            return
        del self._tiers[tier][key]
        labels = self._labels[key[0]]
        labels.discard(key[1])
        if not labels:
            del self._labels[key[0]]
