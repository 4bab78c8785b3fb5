"""Rows of guesses that a hop still holds: confirmed by ids, or not counted on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshd.chain.holding import Holding
from meshd.chain.hops import Hops
from meshd.chain.messages import Need, Step
from meshd.inference.engine import Ran
from tests.chain.steps import STEP, A, changed
from tests.chain.test_hops import compute, hops, sent

# Positions 0..2 are the prompt; then position 3 with guesses for 4, 5 and 6.
WINDOW = changed(STEP, seq=2, start=3, n=4, emit=4, rows=b"x" * 64, guess=(40, 50, 60))


def after_window() -> Hops:
    table = hops()
    for step in (STEP, WINDOW):
        job = compute(table.receive(step, A, 0.0))
        assert job.run.emit == step.n, "a hop in the middle sends every row on"
        ((_, onward),) = sent(table.settle(job, Ran(rows=b"y" * 16 * step.n), 0.0))
        assert isinstance(onward, Step)
        assert onward.guess == step.guess
    return table


def next_step(start: int, recent: tuple[int, ...], *, attempt: int = 1, seq: int = 3) -> Step:
    return changed(STEP, attempt=attempt, seq=seq, start=start, n=1, emit=1, rows=b"x" * 16, recent=recent)


def test_a_step_that_confirms_guesses_is_computed() -> None:
    table = after_window()
    job = compute(table.receive(next_step(6, (7, 40, 50)), A, 1.0))
    assert job.run.start == 6


def test_a_step_before_the_guesses_needs_no_confirmation() -> None:
    table = after_window()
    job = compute(table.receive(next_step(4, ()), A, 1.0))
    assert job.run.start == 4


def test_wrong_guesses_are_asked_for_again() -> None:
    table = after_window()
    for recent in ((7, 40, 51), (), (51,)):
        ((_, need),) = sent(table.receive(next_step(6, recent, attempt=5), A, 1.0))
        assert isinstance(need, Need)
        assert (need.have, need.upto) == (5 if recent == (7, 40, 51) else 4, 6)
        table = after_window()


def test_preparing_does_not_count_on_guesses_either() -> None:
    table = after_window()
    step = changed(next_step(6, (7, 40, 51), attempt=5), n=0, emit=0, rows=b"")
    ((_, need),) = sent(table.receive(step, A, 1.0))
    assert isinstance(need, Need)
    table = after_window()
    ((_, onward),) = sent(table.receive(changed(step, recent=(7, 40, 50)), A, 1.0))
    assert isinstance(onward, Step)


@given(
    st.lists(st.integers(0, 2), min_size=30, max_size=30),
    st.lists(st.tuples(st.integers(0, 29), st.lists(st.integers(0, 2), max_size=8), st.booleans()), max_size=12),
)
def test_what_is_counted_on_is_right(ids: list[int], windows: list[tuple[int, list[int], bool]]) -> None:
    """A hop that sees any of the windows of a session whose final ids are ``ids``: what it computes on was right."""
    holding, tokens = Holding(), list[int]()  # the ids behind the rows that the engine holds
    for position, guess, cut in sorted(windows, key=lambda window: window[0]):
        recent = tuple(ids[max(0, position - (2 if cut else 8)) : position])
        step = changed(STEP, start=position, n=1 + len(guess), guess=tuple(guess), recent=recent)
        if not holding.reaches(step):
            assert tokens[: holding.have] == ids[: holding.have]
            tokens = ids[:position]
            holding.filled(position)
        assert tokens[:position] == ids[:position], "rows before a step's start hold final ids"
        tokens = [*ids[: position + 1], *guess]
        holding.ran(step)
        assert holding.sure <= holding.have == len(tokens)


def test_what_an_engine_lost_is_not_in_doubt_any_more() -> None:
    holding = Holding()
    holding.ran(WINDOW)
    holding.lost(5)
    assert (holding.have, holding.sure) == (5, 4)
    assert holding.reaches(next_step(5, (40,)))
    holding.ran(WINDOW)
    holding.lost(2)
    assert (holding.have, holding.sure) == (2, 2)
