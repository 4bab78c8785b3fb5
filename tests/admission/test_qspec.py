"""Comparing rows: honest arithmetic passes, broken arithmetic does not, odd bytes are refused."""

from __future__ import annotations

import math
import struct
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.admission.qspec import (
    COMPARED,
    EXACT,
    PROMPTS,
    Answer,
    GoldenPrompt,
    choose_prompts,
    judge,
    odd_one_out,
    probe_steps,
)
from meshd.admission.rows import all_finite, decode_untrusted, encode, relative_error
from meshd.errors import BadTensor

HIDDEN = 64
PROMPT = GoldenPrompt(tuple(range(10)), tuple(range(100, 110)), (2.0,) * 9 + (0.5,))


def fp32(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def noisy(rng: Random, values: list[float], share: float) -> list[float]:
    """The values with an error of that relative size."""
    noise = [rng.gauss(0, 1) for _ in values]
    scale = share * math.hypot(*values) / math.hypot(*noise)
    return [value + scale * error for value, error in zip(values, noise, strict=True)]


def noisy_rows(rng: Random, errors: list[float]) -> Answer:
    """One prompt's rows, each with an error of its own."""
    rows = [[rng.gauss(0, 3) for _ in range(HIDDEN)] for _ in errors]
    got = [noisy(rng, row, error) for row, error in zip(rows, errors, strict=True)]
    return Answer(PROMPT, encode(fp32([*chain.from_iterable(got)]), "bf16"), fp32([*chain.from_iterable(rows)]))


def answers(errors: list[float], *, dtype: str = "bf16", greedy: tuple[int, ...] = ()) -> list[Answer]:
    rng = Random(1)
    made = []
    for error in errors:
        want = [rng.gauss(0, 3) for _ in range(COMPARED * HIDDEN)]
        got = encode(fp32(noisy(rng, want, error)), dtype)
        made.append(Answer(PROMPT, got, fp32(want), greedy))
    return made


def verdict(errors: list[float], dtype: str = "bf16", wire: str = "bf16") -> tuple[bool, str]:
    got = judge(answers(errors, dtype=wire), hidden_size=HIDDEN, dtype=dtype, wire_dtype=wire)
    return got.passed, got.reason


def test_honest_stages_pass_with_their_odd_prompts() -> None:
    assert verdict([0.010, 0.011, 0.012, 0.013]) == (True, "")
    assert verdict([0.012, 0.016, 0.017, 0.065]) == (True, ""), "measured on layers 0..15 of SmolLM2-135M"


def test_rows_that_went_to_other_experts_pass_where_most_did_not() -> None:
    rng = Random(3)
    odd = [[0.015, 0.3, 0.012, 0.017], [0.9, 0.013, 0.016, 0.2], [0.016] * 4, [0.012, 0.014, 0.011, 0.5]]
    assert judge([noisy_rows(rng, rows) for rows in odd], hidden_size=HIDDEN, dtype="bf16", wire_dtype="bf16").passed


def test_a_fault_of_one_position_in_every_prompt_fails() -> None:
    rng = Random(4)
    for at, error in ((0, 0.3), (3, 0.3)):
        rows = [[error if i == at else 0.01 for i in range(COMPARED)]] * PROMPTS
        got = judge([noisy_rows(rng, each) for each in rows], hidden_size=HIDDEN, dtype="bf16", wire_dtype="bf16")
        assert (got.passed, got.error < 0.04) == (False, True)


def test_a_fault_of_the_cached_steps_fails() -> None:
    rng = Random(5)
    shifted = [noisy_rows(rng, [0.01, 0.063, 0.07, 0.065]) for _ in range(PROMPTS)]
    assert not judge(shifted, hidden_size=HIDDEN, dtype="bf16", wire_dtype="bf16").passed


def test_a_stage_that_leaves_out_a_layer_fails() -> None:
    passed, reason = verdict([0.117, 0.129, 0.177, 0.188])
    assert not passed
    assert reason == "rows are off by 14.6%, bf16 allows 4%"


def test_a_fault_that_one_prompt_meets_fails() -> None:
    assert not verdict([0.01, 0.01, 0.01, 0.5])[0]


@pytest.mark.parametrize(
    ("dtype", "honest", "broken"), [("fp32", 0.001, 0.02), ("fp16", 0.005, 0.03), ("int8", 0.05, 0.12)]
)
def test_every_dtype_has_its_gate(dtype: str, honest: float, broken: float) -> None:
    wire = "bf16" if dtype == "int8" else dtype
    assert verdict([honest] * 4, dtype, wire)[0]
    assert not verdict([broken] * 4, dtype, wire)[0]


def test_rows_that_are_not_finite_fail_whatever_the_gate() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        made = answers([0.0])
        values = list(decode_untrusted(made[0].want, COMPARED, HIDDEN, "fp32"))
        values[7] = bad
        made[0] = Answer(PROMPT, fp32(values), made[0].want)
        got = judge(made, hidden_size=HIDDEN, dtype="fp32", wire_dtype="fp32")
        assert (got.passed, got.reason) == (False, "rows that are not finite")


def test_ids_count_where_the_margin_leaves_no_doubt() -> None:
    right, close, wrong = (106, 107, 108, 109), (106, 107, 108, 1), (106, 1, 108, 109)
    for greedy, passes in ((right, True), (close, True), (wrong, False)):
        got = judge(answers([0.01] * 4, greedy=greedy), hidden_size=HIDDEN, dtype="bf16", wire_dtype="bf16")
        assert got.passed == passes
        assert passes or got.reason == "id 1 instead of 107 at position 7"


def test_digests_are_equal_or_wrong() -> None:
    good = Answer(PROMPT, b"a" * 64, b"a" * 64, (106, 107, 108, 109))
    assert judge([good], hidden_size=4, dtype=EXACT, wire_dtype=EXACT).passed
    assert not judge([good, Answer(PROMPT, b"a" * 64, b"b" * 64)], hidden_size=4, dtype=EXACT, wire_dtype=EXACT).passed
    assert not judge([Answer(PROMPT, b"", b"", (1, 1, 1, 1))], hidden_size=4, dtype=EXACT, wire_dtype=EXACT).passed


def test_rows_of_the_wrong_size_are_refused() -> None:
    short = [Answer(PROMPT, a.got[:-2], a.want) for a in answers([0.0])]
    with pytest.raises(BadTensor):
        judge(short, hidden_size=HIDDEN, dtype="bf16", wire_dtype="bf16")
    with pytest.raises(BadTensor, match="int4"):
        judge(answers([0.0]), hidden_size=HIDDEN, dtype="bf16", wire_dtype="int4")


def test_no_prompts_no_verdict_in_favour() -> None:
    assert not judge([], hidden_size=HIDDEN, dtype="bf16", wire_dtype="bf16").passed


def test_a_probe_prefills_all_but_three_and_compares_four() -> None:
    for length in range(COMPARED, 17):
        steps = probe_steps(length)
        assert [p for s in steps for p in range(s.start, s.start + s.n)] == list(range(length))
        assert sum(step.emit for step in steps) == COMPARED
        assert [step.n for step in steps[1:]] == [1, 1, 1]


def test_prompts_are_chosen_afresh_and_long_enough() -> None:
    prompts = [GoldenPrompt((1,) * n, (1,) * n, (1.0,) * n) for n in (3, 4, 8, 16, 16, 16, 16, 2)]
    chosen = [tuple(choose_prompts(prompts, Random(seed))) for seed in range(50)]
    assert all(len(set(one)) == PROMPTS and set(one) <= {1, 2, 3, 4, 5, 6} for one in chosen)
    assert len(set(chosen)) > 20
    assert choose_prompts(prompts[:2], Random(1)) == [1]


def test_the_odd_one_of_three_is_found_or_nobody_is_blamed() -> None:
    rng = Random(2)
    truth = [rng.gauss(0, 3) for _ in range(COMPARED * HIDDEN)]

    def rows(*errors: float) -> list[bytes]:
        return [encode(fp32(noisy(rng, truth, error)), "bf16") for error in errors]

    def odd(*errors: float) -> int | None:
        return odd_one_out(rows(*errors), COMPARED, hidden_size=HIDDEN, dtype="bf16", wire_dtype="bf16")

    assert odd(0.01, 0.01, 0.3) == 2
    assert odd(0.3, 0.01, 0.01) == 0
    assert odd(0.01, 0.3, 0.01) == 1
    assert odd(0.01, 0.01, 0.01) is None
    assert odd(0.5, 0.6, 0.7) is None
    assert odd_one_out([b"a", b"b", b"a"], 1, hidden_size=1, dtype=EXACT, wire_dtype=EXACT) == 1


FINITE = st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32)


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_bf16_is_rounded_to_nearest_whatever_stands_beside(values: list[float]) -> None:
    got = decode_untrusted(encode(fp32(values), "bf16"), 1, len(values), "bf16")
    for value, rounded in zip(values, got, strict=True):
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        down, up = (
            struct.unpack("<f", struct.pack("<I", b))[0] for b in (bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000)
        )
        assert rounded in (down, up)
        assert abs(rounded - value) == min(abs(down - value), abs(up - value))


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_fp32_survives(values: list[float]) -> None:
    assert list(decode_untrusted(encode(fp32(values), "fp32"), 1, len(values), "fp32")) == values


def test_what_a_dtype_cannot_hold_is_refused() -> None:
    assert list(decode_untrusted(encode(fp32([1.5, -2.0]), "fp16"), 1, 2, "fp16")) == [1.5, -2.0]
    with pytest.raises(BadTensor, match="fp16"):
        encode(fp32([1e6]), "fp16")
    with pytest.raises(BadTensor):
        encode(b"abc", "bf16")


@given(
    st.binary(max_size=64), st.sampled_from(["bf16", "fp16", "fp32", "int8", ""]), st.integers(0, 8), st.integers(0, 8)
)
def test_any_bytes_are_decoded_or_refused(body: bytes, dtype: str, n: int, hidden: int) -> None:
    try:
        values = decode_untrusted(body, n, hidden, dtype)
    except BadTensor:
        return
    assert len(values) == n * hidden
    assert all_finite(values) == all(math.isfinite(value) for value in values)
    assert relative_error(values, values) in (0.0, math.inf)
