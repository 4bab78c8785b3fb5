"""Guesses: what is proposed, when it pays, and that answers never change by it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.chain.drafts import MAX_DRAFTS, NgramDrafts
from meshd.chain.request import GenerationRequest
from meshd.inference.engine import Sampling
from meshd.inference.hash_stage import reference
from tests.chain.room import LAYERS, open_room, run, three_stages
from tests.sim.chain_faults import ScriptedDrafts

PROMPT = tuple(b"The capital of France is")


def follow(ids: list[int], known: int, *, row_s: float = 0.0001, wire_s: float = 0.01) -> tuple[int, int, int, int]:
    """Passes, those with guesses, guesses, accepted ones: the answer is ``ids[known:]``, a plain pass computes 10 ms."""
    drafts, at, passes, windows, drafted, accepted = NgramDrafts(), known, 0, 0, 0, 0
    while at < len(ids):
        guess = drafts.propose(ids[:at], min(MAX_DRAFTS, len(ids) - at - 1))
        right = 0
        while right < len(guess) and guess[right] == ids[at + right]:
            right += 1
        compute_s = 0.01 + row_s * len(guess)
        drafts.learn(len(guess), compute_s + wire_s, compute_s)
        windows += bool(guess)
        at, passes, drafted, accepted = at + right + 1, passes + 1, drafted + len(guess), accepted + right
    return passes, windows, drafted, accepted


def test_a_copied_text_takes_a_fraction_of_the_passes() -> None:
    rng = random.Random(1)
    text = [rng.randrange(1000) for _ in range(200)]
    passes, _, drafted, accepted = follow([*text, *text], 201)
    assert passes < 199 / 3
    assert accepted > drafted * 0.8


def test_a_loop_is_followed_round_and_round() -> None:
    passes, _, _, _ = follow([*range(100, 130), *([1, 2, 3] * 60)], 36)
    assert passes < 174 / 3


def test_text_that_does_not_repeat_is_left_alone() -> None:
    rng = random.Random(2)
    passes, windows, _, _ = follow([rng.randrange(40) for _ in range(600)], 100)
    assert windows < passes / 10, "chance matches are soon known for what they are"


def test_rows_that_cost_a_pass_are_not_sent() -> None:
    rng = random.Random(3)
    text = [rng.randrange(1000) for _ in range(200)]
    _, _, cheap, _ = follow([*text, *text], 201)
    _, _, dear, _ = follow([*text, *text], 201, row_s=0.02, wire_s=0.0)
    assert dear < cheap / 4


def test_a_slow_link_makes_guesses_worth_more() -> None:
    rng = random.Random(4)
    text = [rng.randrange(1000) for _ in range(120)]
    broken = [token if rng.random() < 0.6 else rng.randrange(1000) for token in text]
    _, _, near, _ = follow([*text, *broken], 121, row_s=0.002, wire_s=0.0)
    _, _, far, _ = follow([*text, *broken], 121, row_s=0.002, wire_s=0.2)
    assert far > near


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, MAX_DRAFTS))
def test_guesses_are_ids_that_were_there(ids: list[int], most: int) -> None:
    drafts = NgramDrafts()
    for end in range(1, len(ids) + 1):
        guess = drafts.propose(ids[:end], most)
        assert len(guess) <= most
        assert set(guess) <= set(ids[:end])
        pairs = set(pairwise(ids[:end]))
        assert all(pair in pairs for pair in pairwise([ids[end - 1], *guess])), "guesses follow as they once did"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=7), Sampling(logprobs=2)])
def test_answers_are_the_same_and_take_fewer_passes(sampling: Sampling) -> None:
    want = reference(PROMPT, 60, LAYERS, sampling=sampling)

    async def main() -> None:
        async with open_room() as room:
            room.drafts = lambda _request: ScriptedDrafts((*PROMPT, *want), random.Random(5))
            await three_stages(room)
            out = await room.ask(9, GenerationRequest(PROMPT, 60, sampling=sampling))
            assert out.tokens == want
            assert out.finished is not None
            timings = out.finished.timings
            assert 0 < timings.accepted_tokens < timings.drafted_tokens
            assert len(set(out.times)) == 60 - timings.accepted_tokens, "an accepted guess is a pass saved"
            await room.quiet()

    run(main)


@pytest.mark.parametrize(
    ("sampling", "drafts"), [(Sampling(temperature=0.7, seed=12, presence_penalty=0.5), True), (Sampling(), False)]
)
def test_penalties_are_not_guessed_at_nor_who_wants_no_guesses(sampling: Sampling, drafts: bool) -> None:
    want = reference(PROMPT, 30, LAYERS, sampling=sampling)

    async def main() -> None:
        async with open_room() as room:
            room.drafts = lambda _request: ScriptedDrafts((*PROMPT, *want), random.Random(5))
            await three_stages(room)
            out = await room.ask(9, GenerationRequest(PROMPT, 30, sampling=sampling, drafts=drafts))
            assert out.tokens == want
            assert out.finished is not None
            assert out.finished.timings.drafted_tokens == 0

    run(main)


def test_an_end_token_within_a_window_ends_the_answer() -> None:
    want = reference(PROMPT, 40, LAYERS)
    eos = want[20]
    first = want.index(eos)

    async def main() -> None:
        async with open_room() as room:
            room.drafts = lambda _request: ScriptedDrafts((*PROMPT, *want), random.Random(6))
            await three_stages(room)
            out = await room.ask(9, GenerationRequest(PROMPT, 40, eos_ids=frozenset({eos})))
            assert out.tokens == want[: first + 1]
            assert out.finished is not None
            assert out.finished.reason == "stop"

    run(main)


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_death_among_windows_changes_nothing(victim: int) -> None:
    want = reference(PROMPT, 60, LAYERS)

    async def main() -> None:
        async with open_room() as room:
            room.drafts = lambda _request: ScriptedDrafts((*PROMPT, *want), random.Random(victim))
            await three_stages(room)
            seen = 0

            def on_token(count: int) -> None:
                nonlocal seen
                if seen < 25 <= count:
                    room.kill(victim)
                seen = count

            out = await room.ask(9, GenerationRequest(PROMPT, 60), on_token=on_token)
            assert out.tokens == want
            assert out.finished is not None
            assert len(out.finished.recoveries) == 1

    run(main)
