from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="needs the engine extra")

from hypothesis import given, settings  # noqa: E402  # after the check for the extra
from hypothesis import strategies as st  # noqa: E402

from meshd.errors import EngineFailed  # noqa: E402
from meshd.inference.engine import Sampling  # noqa: E402
from meshd.inference.worker.sampling import draw  # noqa: E402

pytestmark = pytest.mark.torch

logit_rows = st.lists(st.integers(-20, 20).map(lambda x: x / 4), min_size=3, max_size=40)


def one(row: list[float], sampling: Sampling, *, position: int = 7, history: tuple[int, ...] = ()) -> int:
    return draw(torch.tensor([row]), position, sampling, history)[0].token


def kept(row: list[float], sampling: Sampling) -> set[int]:
    """By hand, and differently: which ids may be drawn."""
    scaled = [x / sampling.temperature for x in row]
    order = sorted(range(len(row)), key=lambda i: (-scaled[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(math.exp(scaled[i]) for i in order)
    before = 0.0
    head: list[int] = []
    for i in order:
        if head and before >= sampling.top_p + 1e-9:
            break
        head.append(i)
        before += math.exp(scaled[i]) / total
    top = max(scaled[i] for i in head)
    return {i for i in head if scaled[i] >= top + (math.log(sampling.min_p) if sampling.min_p else -1e9) - 1e-9}


@settings(max_examples=150, deadline=None)
@given(logit_rows)
def test_greedy_takes_the_lowest_of_the_largest(row: list[float]) -> None:
    choice = draw(torch.tensor([row]), 3, Sampling())[0]
    assert choice.token == choice.argmax == row.index(max(row))
    assert choice.logit == max(row)
    assert choice.position == 3
    assert choice.logprob is None


@settings(max_examples=200, deadline=None)
@given(
    row=logit_rows,
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 1 << 32),
)
def test_draws_stay_inside_what_is_allowed(
    *, row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert one(row, sampling) in kept(row, sampling)


@settings(max_examples=60, deadline=None)
@given(st.lists(logit_rows.map(lambda row: (row * 14)[:40]), min_size=2, max_size=5), st.integers(0, 1 << 32))
def test_a_row_is_drawn_the_same_in_any_company(rows: list[list[float]], seed: int) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=seed, logprobs=3)
    together = draw(torch.tensor(rows), 10, sampling)
    assert together == [draw(torch.tensor([row]), 10 + i, sampling)[0] for i, row in enumerate(rows)]


def test_draws_follow_the_distribution() -> None:
    row = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    counts = [0] * 4
    for position in range(4000):
        counts[one(row, Sampling(temperature=1.0, seed=5), position=position)] += 1
    for count, p in zip(counts, (0.5, 0.3, 0.15, 0.05), strict=True):
        assert abs(count / 4000 - p) < 5 * math.sqrt(p * (1 - p) / 4000)


def test_other_seeds_and_positions_draw_otherwise() -> None:
    row = [0.0] * 1000
    assert len({one(row, Sampling(temperature=1.0, seed=s), position=p) for s in range(5) for p in range(5)}) > 20


def test_a_last_bit_of_difference_does_not_change_draws() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(200, 500, generator=generator)
    nudged = rows + torch.randn(200, 500, generator=generator) * 1e-6
    sampling = Sampling(temperature=1.0, seed=3)
    same = [a.token == b.token for a, b in zip(draw(rows, 0, sampling), draw(nudged, 0, sampling), strict=True)]
    assert sum(same) >= 199


def test_penalties_count_what_was_generated_and_drawn_in_the_window() -> None:
    row = [5.0, 4.9, 0.0]
    assert one(row, Sampling(presence_penalty=1.0)) == 0
    assert one(row, Sampling(presence_penalty=1.0), history=(0,)) == 1
    assert one(row, Sampling(frequency_penalty=0.06), history=(0,)) == 0
    assert one(row, Sampling(frequency_penalty=0.06), history=(0, 0)) == 1
    assert one(row, Sampling(repetition_penalty=2.0), history=(0,)) == 1
    assert one([-1.0, -1.5], Sampling(repetition_penalty=2.0), history=(0,)) == 1
    window = draw(torch.tensor([row, row]), 0, Sampling(presence_penalty=1.0))
    assert [choice.token for choice in window] == [0, 1]
    assert [choice.argmax for choice in window] == [0, 0]


def test_logprobs_are_the_models_own() -> None:
    row = [math.log(p) for p in (0.1, 0.6, 0.3)]
    choice = draw(torch.tensor([row]), 0, Sampling(temperature=0.5, top_k=1, logprobs=2))[0]
    assert choice.logprob == pytest.approx(math.log(0.6))
    assert [i for i, _ in choice.top] == [1, 2]
    assert choice.top[1][1] == pytest.approx(math.log(0.3))
    assert draw(torch.tensor([row]), 0, Sampling(logprobs=0))[0].top == ()


def test_top_p_over_more_than_the_first_candidates() -> None:
    row = [0.0] * 3000
    assert {one(row, Sampling(temperature=1.0, top_p=0.9, seed=s)) < 2701 for s in range(30)} == {True}


def test_logits_that_are_not_finite_are_the_engines_fault() -> None:
    with pytest.raises(EngineFailed):
        draw(torch.tensor([[0.0, float("nan"), 1.0]]), 0, Sampling())
    with pytest.raises(EngineFailed):
        draw(torch.tensor([[0.0, float("inf")]]), 0, Sampling())


def test_tokens_that_the_model_rules_out_are_never_drawn() -> None:
    row = [float("-inf"), 0.0, float("-inf"), 0.0]
    assert {one(row, Sampling(temperature=1.0, seed=s)) for s in range(20)} == {1, 3}
    assert one(row, Sampling(temperature=1.0, top_p=0.3)) == 1
    assert one(row, Sampling()) == 1
