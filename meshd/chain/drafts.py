"""Guesses at the next tokens, and whether to send them. Pure.

Text repeats itself: a name, a list, code that is edited. The longest end of a session's ids that has occurred before is looked
up, and what followed it then is the guess (prompt lookup). A step carries the guesses behind the last token; the exit draws a
token for each row, and the entry accepts while guess == drawn token. Draws are keyed by (seed, position) and rows of a window
equal rows computed one by one where arithmetic is deterministic, so an answer is the same with and without guesses.

How many are sent is decided by what was measured in this session: how often guesses of that length of match came true (told
from every token, also when nothing was sent), and what a pass and a row more in it take. A pass with k guesses makes
``1 + q + .. + q^k`` tokens; the k with the most tokens per second wins, and no guess is sent unless that is better by
`WORTHWHILE`. So a slow link makes guesses cheap, and text that does not repeat sends none.

Must not know routes, messages, clocks. Units: seconds, ids. `Drafts` is the seam: simulations guess by script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

MAX_DRAFTS: Final = 8  # guesses in one step; verifying 8 rows more costs about a fifth of a pass (measured)
MAX_MATCH: Final = 4  # longer ends are not told apart
WORTHWHILE: Final = 1.08
ROW_SHARE: Final = (
    0.03  # what a row more costs, as a share of a pass's compute, until it was measured (measured: 0.024)
)
NEWEST: Final = 0.2
_FIRST_GUESS: Final = (0.0, 0.1, 0.3, 0.5, 0.6)  # right ones by length of match, until they were counted


class Drafts(Protocol):
    """Where an entry gets its guesses from."""

    def propose(self, ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Guesses for the positions from ``len(ids)`` on, at most ``most``. Called once before each token's step."""
        ...

    def learn(self, guesses: int, elapsed_s: float, compute_s: float) -> None:
        """A pass with so many guesses took that long, ``compute_s`` of it in the stages."""
        ...


class NgramDrafts:
    """Prompt lookup over one session's ids."""

    def __init__(self) -> None:
        self._indexed = 0
        self._after: dict[tuple[int, ...], int] = {}  # what each end of ids was last followed by: a position
        self._rates = list(_FIRST_GUESS)
        self._seen = [0] * len(_FIRST_GUESS)
        self._bet: tuple[int, int, tuple[int, ...]] = (0, 0, ())  # position, length of match, guesses
        self._cost = _Cost()

    def propose(self, ids: Sequence[int], most: int) -> tuple[int, ...]:
        self._settle(ids)
        self._index(ids)
        match, guesses = self._look_up(ids)
        self._bet = (len(ids), match, guesses)
        return guesses[: self._cost.best(self._rates[match], min(most, len(guesses)))] if guesses else ()

    def learn(self, guesses: int, elapsed_s: float, compute_s: float) -> None:
        self._cost.learn(guesses, elapsed_s, compute_s)

    def _settle(self, ids: Sequence[int]) -> None:
        """What became of the last guesses, whether they were sent or not: each tells until the first that was wrong."""
        position, match, guesses = self._bet
        for guess, token in zip(guesses, ids[position:], strict=False):
            self._seen[match] += 1
            self._rates[match] += max(NEWEST, 1 / (1 + self._seen[match])) * ((guess == token) - self._rates[match])
            if guess != token:
                break

    def _index(self, ids: Sequence[int]) -> None:
        for at in range(max(1, self._indexed), len(ids)):
            for n in range(1, min(MAX_MATCH, at) + 1):
                self._after[tuple(ids[at - n : at])] = at
        self._indexed = len(ids)

    def _look_up(self, ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        for n in range(min(MAX_MATCH, len(ids)), 0, -1):
            at = self._after.get(tuple(ids[-n:]))
            if at is not None:
                period = len(ids) - at  # what follows may reach the end: then it goes round
                return n, tuple(ids[at + i % period] for i in range(MAX_DRAFTS))
        return 0, ()


class _Cost:
    """What a pass takes: wires, the stages' compute for one row, and each row more. Seconds."""

    def __init__(self) -> None:
        self._wire_s = 0.0
        self._one_s: float | None = None
        self._row_s: float | None = None

    def learn(self, guesses: int, elapsed_s: float, compute_s: float) -> None:
        self._wire_s += NEWEST * (max(0.0, elapsed_s - compute_s) - self._wire_s)
        if guesses == 0:
            self._one_s = _newer(self._one_s, compute_s)
        elif self._one_s is not None:
            self._row_s = _newer(self._row_s, max(0.0, compute_s - self._one_s) / guesses)

    def best(self, rate: float, most: int) -> int:
        """How many of ``most`` guesses, each right with probability ``rate`` if the one before was, make the most tokens a
        second."""
        one_s = self._one_s
        if one_s is None:  # a plain pass first: without it nobody can tell what a row more takes
            return 0
        row_s = ROW_SHARE * one_s if self._row_s is None else self._row_s
        plain_s = self._wire_s + one_s
        best, chosen, tokens, power = WORTHWHILE, 0, 1.0, 1.0
        for k in range(1, most + 1):
            power *= rate
            tokens += power
            # Passes that cost nothing (a rehearsal) are all alike: then more tokens are better.
            gain = tokens * plain_s / (plain_s + k * row_s) if plain_s > 0.0 else tokens
            if gain > best:
                best, chosen = gain, k
        return chosen


def _newer(old: float | None, new: float) -> float:
    return new if old is None else old + NEWEST * (new - old)
