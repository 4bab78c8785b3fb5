"""What routes really delivered: one arm per route, keyed by node ids and ranges.

Owns the measurements and the topology epoch they belong to. Units: ``tps`` is end-to-end tokens/s of a finished answer,
``mass`` the number of samples, each halved every ``half_life_s``. Invariants: an arm's ``tps`` survives decay and epoch
changes (it is shown and used until something better is known); only its standing changes. Bounded by `MAX_ARMS` and
`IDLE_S`. Time comes in as an argument; dumps carry ages, because monotonic clocks do not survive a restart.

Source of the update rule: a mean over the time-decayed mass, in which a new sample counts for at least a quarter. A plain
mean over ten minutes would follow a device that has just slowed down after hundreds of requests only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

IDLE_S: Final = 86_400.0
MAX_ARMS: Final = 512
PROVEN_MASS: Final = 0.5
_MEMORY: Final = 3.0  # samples that a new one is averaged with, at most
_NO_EPOCH: Final = -1


@dataclass(slots=True)
class Arm:
    """One route's record. ``mass`` and ``failures`` are as of ``at``; ``epoch`` is that of the last sample."""

    at: float
    tps: float | None = None
    mass: float = 0.0
    failures: float = 0.0
    samples: int = 0
    epoch: int = _NO_EPOCH


@dataclass(frozen=True, slots=True)
class ArmView:
    """An arm as of one moment. ``status``: proven, unsampled, stale (measured in another topology), decayed."""

    tps: float | None
    mass: float
    samples: int
    success: float  # 1: never failed
    status: str


class ArmStats:
    """All arms of all models."""

    def __init__(self, *, half_life_s: float, min_sample_tokens: int) -> None:
        self._half_life_s = half_life_s
        self._min_sample_tokens = min_sample_tokens
        self._arms: dict[str, Arm] = {}

    def record(self, key: str, *, tokens: int, seconds: float, epoch: int, now: float) -> None:
        """An answer that came to its end. Too few tokens say nothing about speed and change nothing."""
        if tokens < self._min_sample_tokens or not math.isfinite(seconds) or seconds <= 0.0:
            return
        arm = self._touch(key, now)
        speed = tokens / seconds
        if arm.tps is None or arm.mass == 0.0:
            arm.tps = speed
        else:
            # What was measured in another topology counts as one sample at most.
            weight = min(arm.mass, 1.0 if arm.epoch != epoch else _MEMORY)
            arm.tps += (speed - arm.tps) / (1.0 + weight)
        arm.mass += 1.0
        arm.samples += 1
        arm.epoch = epoch

    def fail(self, key: str, now: float) -> None:
        """A request that this route did not finish."""
        self._touch(key, now).failures += 1.0

    def view(self, key: str, *, epoch: int, now: float) -> ArmView:
        arm = self._arms.get(key)
        if arm is None:
            return ArmView(None, 0.0, 0, 1.0, "unsampled")
        fade = self._fade(arm, now)
        mass = arm.mass * fade
        success = (1.0 + mass) / (1.0 + mass + arm.failures * fade)
        if arm.tps is None:
            status = "unsampled"
        elif arm.epoch != epoch:
            status = "stale"
        else:
            status = "proven" if mass >= PROVEN_MASS else "decayed"
        return ArmView(arm.tps, mass, arm.samples, success, status)

    def dump(self, now: float) -> dict[str, Any]:
        """Plain data for the state folder."""
        self._prune(now)
        return {
            key: {
                "age_s": max(0.0, now - arm.at),
                "tps": arm.tps,
                "mass": arm.mass,
                "failures": arm.failures,
                "samples": arm.samples,
            }
            for key, arm in self._arms.items()
        }

    def load(self, data: object, now: float) -> None:
        """Take over a dump; all of it is stale. A damaged entry is left out: statistics are never worth a failed start."""
        entries: Iterable[tuple[object, object]] = data.items() if isinstance(data, Mapping) else ()
        for key, entry in entries:
            if not isinstance(key, str) or not isinstance(entry, Mapping):
                continue
            age_s, mass, failures = (_finite(entry.get(name)) for name in ("age_s", "mass", "failures"))
            samples, tps = entry.get("samples"), entry.get("tps")
            speed = None if tps is None else _finite(tps)
            if age_s is None or mass is None or failures is None or not isinstance(samples, int):
                continue
            if tps is not None and not speed:
                continue
            self._arms[key] = Arm(now - age_s, speed, mass, failures, max(0, samples))
        self._prune(now)

    def _touch(self, key: str, now: float) -> Arm:
        arm = self._arms.get(key)
        if arm is None:
            self._prune(now)
            arm = self._arms[key] = Arm(now)
        fade = self._fade(arm, now)
        arm.mass *= fade
        arm.failures *= fade
        arm.at = max(arm.at, now)
        return arm

    def _fade(self, arm: Arm, now: float) -> float:
        return float(0.5 ** (max(0.0, now - arm.at) / self._half_life_s))

    def _prune(self, now: float) -> None:
        for key in [key for key, arm in self._arms.items() if now - arm.at >= IDLE_S]:
            del self._arms[key]
        excess = len(self._arms) - MAX_ARMS + 1
        if excess > 0:
            for key in sorted(self._arms, key=lambda key: self._arms[key].at)[:excess]:
                del self._arms[key]


class Topology:
    """The epoch of one model's room. Moves when somebody proven comes, goes or changes its range.

    Suspicion and load do not move it: a suspect either refutes or dies, and only the death is news.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._seen: frozenset[object] | None = None

    def observe(self, holders: Iterable[object]) -> int:
        """``holders``: one hashable fact per proven holder."""
        seen = frozenset(holders)
        if self._seen is not None and seen != self._seen:
            self.epoch += 1
        self._seen = seen
        return self.epoch


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
