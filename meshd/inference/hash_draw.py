"""Drawing tokens of the rehearsal model: what `worker.sampling` does to logits, done to ranks. Pure.

The head's ids stand in a row, the greedy one first, and each is less likely than the one before it by a constant factor. It is
small, so that a draw keyed by the wrong seed or position is hardly ever the right one by chance. Order, as there: temperature,
top_k, top_p, min_p (penalties are the digest's affair, see `hash_stage`); told log-probabilities are those before all that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import Final

from meshd.inference.engine import Sampling

RANKS: Final = 95  # printable ASCII
_STEP: Final = 0.125  # from the logit of one rank to that of the next
_TOTAL: Final = math.log(math.fsum(math.exp(-_STEP * rank) for rank in range(RANKS)))


def logprob(rank: int) -> float:
    """The model's own log-probability of a rank."""
    return -_STEP * rank - _TOTAL


def drawn_rank(sampling: Sampling, noise: bytes) -> int:
    """The rank that ``noise`` (8 bytes, uniform) draws; ``temperature`` must not be 0."""
    sums = _cumulated(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    uniform = (int.from_bytes(noise) >> 11) * 2.0**-53
    return min(bisect_right(sums, uniform * sums[-1]), len(sums) - 1)


@lru_cache(maxsize=64)
def _cumulated(temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[float, ...]:
    """The summed weights of the ranks that may be drawn, which are the first so many; always at least one."""
    weights = [math.exp(-_STEP * rank / temperature) for rank in range(min(top_k or RANKS, RANKS))]
    reached = [0.0, *accumulate(weights)]
    # A rank stays when what lies before it has not reached top_p yet.
    kept = sum(before < top_p * reached[-1] for before in reached[:-1]) if top_p < 1.0 else len(weights)
    sums = [total for total, weight in zip(reached[1:], weights[: max(1, kept)], strict=False) if weight >= min_p]
    return tuple(sums)
