"""Which candidate the next request takes: cold, scout or exploit.

Pure arithmetic over candidates that already carry everything known about them. `draw_of` says with what probability each is
taken, `Draw.pick` takes one; the table of ``/v1/routing`` shows the same numbers that a request is drawn by.

* nothing sampled: the best prior (``cold``);
* with probability ``explore_share``, if anything is unproven: the least measured, prior breaks ties (``scout``);
* else by ``speed ** alpha`` over the proven, or over the stale while nothing is proven (``exploit``).

A candidate's own outstanding requests divide its speed, and a busy route is left out while another would serve the request
faster: drawing by speed alone leaves a third of two equal lanes idle. When every measured route is busy and an unmeasured
one is idle and promises as much, that one is scouted at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from meshd.routing.stats import ArmView
from meshd.vocabulary import Route


@dataclass(frozen=True, slots=True)
class Candidate:
    """A route with what is claimed (``prior_tps``), measured (``arm``) and running (``outstanding``) on it."""

    hops: Route
    prior_tps: float
    arm: ArmView
    outstanding: int = 0

    @property
    def prior(self) -> float:
        """What this route promises the next request."""
        return self.prior_tps / (1 + self.outstanding)

    @property
    def speed(self) -> float:
        """What this route delivered, as far as the next request gets it."""
        return (self.arm.tps or 0.0) * self.arm.success / (1 + self.outstanding)


@dataclass(frozen=True, slots=True)
class Draw:
    """``scouted`` is taken with probability ``explore``, else one by ``weights`` (which sum to 1 unless explore is 1)."""

    mode: str
    scouted: int | None
    explore: float
    weights: tuple[float, ...]

    def shares(self) -> list[float]:
        """The probability of each candidate; sums to 1."""
        shares = [(1.0 - self.explore) * weight for weight in self.weights]
        if self.scouted is not None:
            shares[self.scouted] += self.explore
        return shares

    def pick(self, rng: Random) -> tuple[int, str]:
        """The candidate's index and the mode it was taken in."""
        if self.scouted is not None and rng.random() < self.explore:
            return self.scouted, "scout"
        return rng.choices(range(len(self.weights)), self.weights)[0], self.mode


def draw_of(candidates: Sequence[Candidate], *, explore_share: float, alpha: float) -> Draw:
    """How the next unpinned request is drawn. ``candidates`` is not empty."""
    everyone = range(len(candidates))
    measured = [i for i in everyone if candidates[i].arm.tps is not None]
    if not measured:
        best = max(everyone, key=lambda i: candidates[i].prior)
        return Draw("cold", None, 0.0, tuple(float(i == best) for i in everyone))
    proven = [i for i in everyone if candidates[i].arm.status == "proven"]
    unproven = [i for i in everyone if candidates[i].arm.status != "proven"]
    scouted = _least_measured(candidates, unproven) if unproven else None
    explore = explore_share if scouted is not None else 0.0
    usable = proven or measured
    if all(candidates[i].outstanding for i in usable):
        promised = max(candidates[i].prior for i in usable)
        idle = [i for i in unproven if candidates[i].outstanding == 0 and candidates[i].prior >= promised]
        if idle:
            scouted, explore = _least_measured(candidates, idle), 1.0
    return Draw("exploit", scouted, explore, _by_speed(candidates, usable, alpha))


def _least_measured(candidates: Sequence[Candidate], among: Sequence[int]) -> int:
    return min(among, key=lambda i: (candidates[i].arm.mass, -candidates[i].prior))


def _by_speed(candidates: Sequence[Candidate], usable: Sequence[int], alpha: float) -> tuple[float, ...]:
    fastest = max(candidates[i].speed for i in usable)
    worth = [i for i in usable if candidates[i].outstanding == 0 or candidates[i].speed >= fastest]
    # Relative to the fastest before the power: no overflow, whatever alpha.
    weights = {i: (candidates[i].speed / fastest) ** alpha for i in worth} if fastest > 0.0 else {}
    total = sum(weights.values())
    return tuple(weights.get(i, 0.0) / total if total > 0.0 else 1.0 / len(candidates) for i in range(len(candidates)))
