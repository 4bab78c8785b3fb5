"""Drawing tokens from logits: the last thing the exit of a chain does.

Owns the arithmetic of `Sampling`. Knows nothing of sessions or batches: each row is drawn alone, so company changes nothing.

Draws are keyed by (seed, absolute position): the noise of a token is a function of both and of its id, added to the scaled
logits, and the largest wins (Gumbel-max: exactly a draw from the softmax). So a replay draws the same token, and a replica
whose logits differ in the last bits almost always does too, which a draw by cumulated probability would not give.

Order: penalties, temperature, top_k, top_p, min_p. ``logprob`` values are of the model's own distribution, before all that.
Ties go to the lowest id everywhere. Errors: EngineFailed for logits that are not finite.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

from meshd.errors import EngineFailed
from meshd.inference.engine import Choice, Sampling

_WIDTHS = (1024, 16384)
"""So many of the largest logits are looked at for top_p before all are sorted (which takes 12 ms for 49,152)."""


def draw(logits: torch.Tensor, position: int, sampling: Sampling, history: Sequence[int] = ()) -> list[Choice]:
    """Choices for consecutive positions, the first row's token being the one for ``position``. ``logits`` is [n, vocab].

    ``history`` is what was generated before it. Later rows see the tokens drawn for the earlier ones: of a draft window, rows
    count only as long as the draft equals what is drawn.
    """
    logits = logits.float()
    best = torch.argmax(logits, dim=-1)
    # NaN counts as the largest; -inf is how some models rule tokens out.
    if not bool(torch.isfinite(logits.gather(1, best[:, None])).all()):
        raise EngineFailed("the model's logits are not finite")
    greedy = best.tolist()
    seen = Counter(history)
    choices = []
    for row, argmax, at in zip(logits, greedy, range(position, position + len(greedy)), strict=True):
        token = argmax if _is_greedy(sampling) else _draw_one(row, at, sampling, seen)
        seen[token] += 1
        logprob, top = _logprobs(row, token, sampling.logprobs)
        choices.append(Choice(at, token, argmax, float(row[argmax]), logprob, top))
    return choices


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0.0 and not sampling.needs_history


def _draw_one(row: torch.Tensor, position: int, sampling: Sampling, seen: Counter[int]) -> int:
    scores = row.double()
    if sampling.needs_history and seen:
        scores = _penalised(scores, sampling, seen)
    if sampling.temperature == 0.0:
        return int(torch.argmax(scores))
    scores = scores / sampling.temperature
    ids = _candidates(scores, sampling)
    if ids is None:
        return int(torch.argmax(scores + _gumbel(sampling.seed, position, torch.arange(len(scores)))))
    ids = ids.sort().values  # so that the first of equals is the lowest id
    return int(ids[torch.argmax(scores[ids] + _gumbel(sampling.seed, position, ids))])


def _penalised(scores: torch.Tensor, sampling: Sampling, seen: Counter[int]) -> torch.Tensor:
    inside = [(token, count) for token, count in seen.items() if token < len(scores)]
    ids = torch.tensor([token for token, _ in inside], dtype=torch.int64)
    counts = torch.tensor([count for _, count in inside], dtype=torch.float64)
    old = scores[ids]
    new = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    new -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return scores.index_copy(0, ids, new)


def _candidates(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """Ids that may be drawn; None for all of them."""
    size = len(scores)
    top_k = min(sampling.top_k or size, size)
    if top_k == size and sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return None
    everything = sampling.top_p >= 1.0 and top_k == size
    ids = torch.arange(size) if everything else _nucleus(scores, top_k, sampling.top_p)
    if sampling.min_p > 0.0:
        kept = scores[ids] >= scores[ids].max() + torch.tensor(sampling.min_p, dtype=torch.float64).log()
        ids = ids[kept]
    return ids


def _nucleus(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The top_k largest, and of those the shortest head that reaches top_p."""
    if top_p >= 1.0:
        return _largest(scores, top_k)
    total = torch.logsumexp(scores if top_k == len(scores) else scores[_largest(scores, top_k)], 0)
    for width in (*(width for width in _WIDTHS if width < top_k), top_k):
        ids = _largest(scores, width)
        reached = torch.cumsum(torch.exp(scores[ids] - total), 0)
        if float(reached[-1]) >= top_p:
            break
    # A token stays when what lies before it has not reached top_p yet; the first one always stays.
    return ids[: 1 + int((reached[:-1] < top_p).sum())]


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest, largest first, the lowest id first among equals. `topk` alone leaves ties to chance."""
    if count < len(scores):
        least = torch.topk(scores, count).values[-1]
        ids = torch.nonzero(scores >= least)[:, 0]
    else:
        ids = torch.arange(len(scores))
    order = torch.sort(scores[ids], descending=True, stable=True).indices
    return ids[order][:count]


def _gumbel(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """The noise of each id: SplitMix64 of (seed, position, id). A function of its arguments alone, unlike a generator's
    stream, so it costs nothing for ids that cannot be drawn and does not depend on torch's version. int64 wraps around."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    mixed = ids * -0x61C8864680B583EB + int.from_bytes(digest, "little", signed=True)
    mixed = (mixed ^ _shifted(mixed, 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ _shifted(mixed, 27)) * -0x6B2FB644ECCEEE15
    mixed = mixed ^ _shifted(mixed, 31)
    uniform = _shifted(mixed, 11).double() * 2.0**-53
    return -torch.log(-torch.log(uniform.clamp_min_(2.0**-54)))


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _logprobs(row: torch.Tensor, token: int, wanted: int | None) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if wanted is None:
        return None, ()
    logprobs = torch.log_softmax(row.double(), dim=0)
    ids = _largest(logprobs, min(wanted, len(row))) if wanted else torch.empty(0, dtype=torch.int64)
    return float(logprobs[token]), tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
