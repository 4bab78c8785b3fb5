"""What is said of each answer and of each stall. Pure.

An answer is right (token for token the undisturbed one), an honest 503 (a range that it names had no replica), or a fault:
wrong tokens, a 503 although every range was held, any other error, an answer after its deadline. A stall is a gap between two
pieces that is far above the usual one; it is put down to a strike on a node that the answer went through, or to the outage that
it ended with or in: then nobody could have gone on earlier. Must not know processes, clocks or sockets.

Times are seconds since the experiment began.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshd.cli.chaos.schedule import OUTAGE, Strike
from meshd.vocabulary import LayerRange

RIGHT = "right"
HONEST = "honest 503"
WRONG = "wrong tokens"
FALSE_503 = "503 although held"
LATE = "late"
LOST = "lost"

STALL_S = 0.15  # a shorter gap is no stall
LINGERS_S = 2.0  # a strike is still felt so long after its end: the struck node is not yet trusted, or lags behind


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as its client saw it. ``times``: when pieces came and how many tokens they had; ``nodes``: whoever is known
    to have had part in it, its entries too; ``code`` is "" for an answer, else the error's."""

    began_s: float
    ended_s: float
    prompt: int
    tokens: tuple[int, ...]
    times: tuple[tuple[float, int], ...]
    nodes: frozenset[str]
    sessions: tuple[str, ...] = ()
    code: str = ""
    message: str = ""
    missing: tuple[LayerRange, ...] = ()
    waited_s: float = 0.0  # how long the entry that refused had been silent before

    @property
    def first_s(self) -> float | None:
        """How long the first token took."""
        return self.times[0][0] - self.began_s if self.times else None


@dataclass(frozen=True, slots=True)
class Outage:
    """Nobody held ``layers`` in this time, as seen by a node that was spared."""

    layers: LayerRange
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap in an answer; ``kind``: reset, silence, outage, or "" when no strike explains it."""

    at_s: float
    length_s: float
    kind: str


def lost_layers(one: Strike, places: Mapping[str, LayerRange | None]) -> LayerRange:
    """What an outage takes away."""
    held = [layers for name in one.nodes if (layers := places[name]) is not None]
    return LayerRange(min(r.start for r in held), max(r.end for r in held))


def judge(asked: Asked, expected: Sequence[int], known: Sequence[Outage], deadline_s: float) -> str:
    """One of the names above."""
    if asked.code == "stage_unavailable":
        return HONEST if _outage(asked, known) else FALSE_503
    if tuple(asked.tokens) != tuple(expected)[: len(asked.tokens)]:
        return WRONG
    if asked.code:
        return LOST
    if len(asked.tokens) != len(expected):
        return WRONG
    return RIGHT if asked.ended_s - asked.began_s <= deadline_s else LATE


def noticed_s(asked: Asked, known: Sequence[Outage]) -> float:
    """How long an entry took for an honest 503, from the moment at which it could know."""
    outage = _outage(asked, known)
    return min(asked.waited_s, asked.ended_s - outage.from_s) if outage else asked.waited_s


def _outage(asked: Asked, known: Sequence[Outage]) -> Outage | None:
    for one in known:
        named = any(gap.start < one.layers.end and one.layers.start < gap.end for gap in asked.missing)
        if named and one.from_s <= asked.ended_s <= one.until_s:
            return one
    return None


def stalls(asked: Asked, strikes: Sequence[Strike], known: Sequence[Outage] = ()) -> list[Stall]:
    """The gaps of one answer."""
    times = [at_s for at_s, _ in asked.times]
    gaps = list(itertools.pairwise(times))
    if not gaps:
        return []
    usual = statistics.median(b - a for a, b in gaps)
    return [
        Stall(a, b - a - usual, _cause(asked, strikes, known, a, b))
        for a, b in gaps
        if b - a > max(STALL_S + usual, 3 * usual)
    ]


def _cause(asked: Asked, strikes: Sequence[Strike], known: Sequence[Outage], a: float, b: float) -> str:
    if any(one.from_s <= b <= one.until_s for one in known):
        return OUTAGE
    felt = [one for one in strikes if asked.nodes & set(one.nodes) and one.at_s <= b and a <= one.end_s + LINGERS_S]
    if not felt:
        return ""
    return "silence" if any(one.silent for one in felt) else "reset"


def tokens_per_s(answers: Iterable[Asked], from_s: float, until_s: float) -> float:
    """Of all clients together."""
    seen = sum(n for one in answers for at_s, n in one.times if from_s <= at_s < until_s)
    return seen / (until_s - from_s)


def each_second(answers: Iterable[Asked], until_s: float) -> list[int]:
    """Tokens in each second."""
    found = [0] * (int(until_s) + 1)
    for one in answers:
        for at_s, n in one.times:
            if 0 <= at_s < len(found):
                found[int(at_s)] += n
    return found


def by_kind(
    answers: Iterable[Asked], strikes: Sequence[Strike], known: Sequence[Outage] = ()
) -> dict[str, list[float]]:
    """Lengths of stalls in seconds."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in answers:
        for stall in stalls(one, strikes, known):
            found[stall.kind].append(stall.length_s)
    return dict(found)


def tally(outcomes: Iterable[str]) -> dict[str, int]:
    """How many of each, faults too."""
    counted = Counter(outcomes)
    return {name: counted[name] for name in (RIGHT, HONEST, WRONG, FALSE_503, LATE, LOST)}
