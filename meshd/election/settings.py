"""The numbers of an election. All nodes of a room should agree on the first three; nothing breaks if they do not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults are those of ``meshd start``. Times in seconds."""

    target_replicas: int = 2
    kv_reserve: float = 0.2  # share of the capacity that weights may not use
    lane_fraction: float = 0.6  # a model within this share of the capacity is taken whole
    margin: float = 0.2  # a move must improve the slowest stage it touches by this share
    settle_s: float = 2.0  # listen this long before the first decision
    claim_s: float = 2.0  # a claim stands this long before its owner loads
    claim_valid_s: float = 10.0
    stalled_s: float = 30.0  # no progress for this long voids a claim
    idle_s: float = 8.0  # a free node that has claimed nothing for this long is not waited for
    move_every_s: float = 30.0
    cool_down_s: float = 120.0  # after taking a range, before moving for speed
    hold_s: float = 60.0
    hold_answer_s: float = 5.0
    retry_s: float = 15.0  # after a load that failed
