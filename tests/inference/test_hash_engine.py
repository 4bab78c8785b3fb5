from __future__ import annotations

import math
import struct
from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import BadTensor, Busy, EngineFailed, NeedRows, RangeNotHeld
from meshd.inference.engine import Engine, Ran, Run, Sampling
from meshd.inference.hash_draw import _cumulated, drawn_rank, logprob
from meshd.inference.hash_engine import HashEngine
from meshd.inference.hash_stage import IDLE_S, HashSessions, HashStage, reference
from meshd.inference.hash_text import HashText
from meshd.vocabulary import LayerRange, ModelSpec, SessionId

LAYERS = 6
S = SessionId("1" * 32)
T = SessionId("2" * 32)
WHOLE = LayerRange(0, LAYERS)
SPEC = ModelSpec("hash:6", "d", "hash", LAYERS, 16, 256, (0,) * LAYERS, 0, 0, False, 64, 8192)


def ids(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def run(
    session: SessionId, layers: LayerRange, start: int, rows: bytes, *, emit: int | None = None, reserve: int = 0
) -> Run:
    n = len(rows) // (4 if layers.start == 0 else 16)
    last = layers.end == LAYERS
    return Run(
        session,
        layers,
        start,
        n,
        (1 if last else n) if emit is None else emit,
        n,
        rows,
        reserve_tokens=reserve,
        sampling=Sampling() if last else None,
    )


def sessions(held: LayerRange = WHOLE, *, kv_bytes: int = 1 << 20) -> HashSessions:
    return HashSessions(HashStage(LAYERS), held, kv_bytes=kv_bytes, bytes_per_token_layer=64)


def token(ran: Ran) -> int:
    return ran.choices[-1].token


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=12),
    st.lists(st.integers(1, LAYERS - 1), max_size=3, unique=True),
    st.lists(st.integers(1, 5), max_size=6),
)
def test_any_cut_and_any_chunks_give_the_reference(prompt: list[int], cuts: list[int], sizes: list[int]) -> None:
    ends = [0, *sorted(cuts), LAYERS]
    stages = [LayerRange(a, b) for a, b in pairwise(ends)]
    stores = [sessions(stage) for stage in stages]
    chunks, at = [], 0
    while at < len(prompt):
        n = sizes.pop() if sizes else 3
        chunks.append(prompt[at : at + n])
        at += n
    out, position, chunk = list[int](), 0, chunks.pop(0)
    while len(out) < 5:
        rows = ids(*chunk)
        for store, stage in zip(stores, stages, strict=True):
            ran = store.run(run(S, stage, position, rows), 0.0)
            rows = ran.rows
        position += len(chunk)
        if chunks:
            chunk = chunks.pop(0)
        else:
            out.append(token(ran))
            chunk = [out[-1]]
    assert out == reference(tuple(prompt), 5, LAYERS)


def test_every_mistake_changes_the_token() -> None:
    stage = HashStage(LAYERS)

    def answer(plan: list[tuple[LayerRange, int]], prompt: tuple[int, ...] = (1, 2, 3)) -> bytes:
        """The residual after ``plan``: ranges, each with rows of another session before the prompt."""
        rows = stage.rows_in(WHOLE, ids(*prompt), len(prompt))
        for layers, stale in plan:
            state = stage.fresh(layers)
            stage.extend(state, layers, [b"s" * 16] * stale)
            stage.extend(state, layers, rows)
            rows = state.log[stale:]
        return rows[-1]

    right = answer([(WHOLE, 0)])
    assert answer([(LayerRange(0, 3), 0), (LayerRange(3, 6), 0)]) == right
    wrong = [
        answer([(LayerRange(0, 2), 0), (LayerRange(3, 6), 0)]),  # a layer skipped
        answer([(LayerRange(0, 3), 0), (LayerRange(2, 6), 0)]),  # a layer doubled
        answer([(LayerRange(3, 6), 0), (LayerRange(0, 3), 0)]),  # the order
        answer([(LayerRange(0, 3), 0), (LayerRange(3, 6), 1)]),  # a wrong position and somebody's kv
        answer([(WHOLE, 0)], (1, 3, 2)),
    ]
    assert right not in wrong
    assert reference((1, 2, 3), 8, LAYERS) != reference((1, 2, 3), 8, LAYERS, seed=1)


def test_sampling_is_keyed_by_seed_and_position() -> None:
    warm = Sampling(temperature=1.0, seed=3)
    assert reference((1,), 9, LAYERS, sampling=warm) == reference((1,), 9, LAYERS, sampling=warm)
    assert reference((1,), 9, LAYERS, sampling=warm) != reference((1,), 9, LAYERS)
    assert reference((1,), 9, LAYERS, sampling=warm) != reference(
        (1,), 9, LAYERS, sampling=Sampling(temperature=1.0, seed=4)
    )
    assert all(32 <= t <= 126 for t in reference((1,), 200, LAYERS))


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 0.7, 1.0, 10.0])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_what_leaves_one_candidate_is_greedy(temperature: float, penalty: float) -> None:
    limits: list[dict[str, Any]] = [
        {"top_p": 0.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 0.01, "top_k": 5, "min_p": 0.1},
    ]
    greedy = reference((1,), 30, LAYERS, sampling=Sampling(presence_penalty=penalty))
    for limit in [*limits, {}] if temperature < 1e-6 else limits:
        sampling = Sampling(temperature, seed=3, presence_penalty=penalty, **limit)
        assert reference((1,), 30, LAYERS, sampling=sampling) == greedy


@pytest.mark.parametrize(
    ("limits", "ranks"),
    [
        ({}, 95),
        ({"top_k": 3}, 3),
        ({"top_k": 500}, 95),
        ({"top_p": 0.2}, 2),
        ({"min_p": 0.7}, 3),
        ({"top_k": 2, "top_p": 0.99}, 2),
    ],
)
def test_draws_are_of_the_candidates_in_proportion(limits: dict[str, Any], ranks: int) -> None:
    count = 20_000
    found = Counter(drawn_rank(Sampling(1.0, **limits), (at * 2**64 // count).to_bytes(8)) for at in range(count))
    total = sum(math.exp(logprob(rank)) for rank in range(ranks))
    assert max(found) < ranks
    for rank in range(ranks):
        assert found[rank] / count == pytest.approx(math.exp(logprob(rank)) / total, abs=2 / count)


@pytest.mark.torch
def test_the_candidates_are_those_of_the_real_sampler() -> None:
    import torch

    from meshd.inference.worker.sampling import _candidates

    logits = torch.tensor([logprob(rank) for rank in range(95)], dtype=torch.float64)
    temperatures, top_ks = (1e-9, 0.1, 1.0, 10.0), (0, 1, 2, 17, 95, 120)
    for limits in product(temperatures, top_ks, (0.0, 0.05, 0.33, 0.77, 0.999, 1.0), (0.0, 0.05, 0.33, 0.9, 1.0)):
        temperature, top_k, top_p, min_p = limits
        real = _candidates(logits / temperature, Sampling(temperature, top_p, top_k, min_p))
        assert len(_cumulated(*limits)) == (95 if real is None else len(real)), limits


def test_told_logprobs_are_of_the_whole_distribution() -> None:
    assert sum(math.exp(logprob(rank)) for rank in range(95)) == pytest.approx(1.0)
    for seed in range(20):
        choice = HashStage(LAYERS).choice(b"r" * 16, 5, Sampling(1.0, seed=seed, logprobs=20))
        assert choice.top[0] == (choice.argmax, logprob(0))
        assert choice.logprob == dict(choice.top).get(choice.token, choice.logprob)


def test_rewinding_gives_the_same_again() -> None:
    store = sessions()
    store.run(run(S, WHOLE, 0, ids(1, 2, 3)), 0.0)
    first = store.run(run(S, WHOLE, 3, ids(4)), 0.0)
    store.run(run(S, WHOLE, 4, ids(9, 9)), 0.0)
    assert store.run(run(S, WHOLE, 3, ids(4)), 0.0) == first
    assert store.length(S, WHOLE) == 4


def test_missing_rows_are_named() -> None:
    store = sessions(LayerRange(0, 3))
    with pytest.raises(NeedRows) as caught:
        store.run(run(S, LayerRange(0, 3), 5, ids(1)), 0.0)
    assert caught.value.have == 0
    ran = store.run(run(S, LayerRange(0, 3), 0, ids(1, 2)), 0.0)
    assert store.boundary(S, LayerRange(0, 3), 0, 2) == ran.rows
    with pytest.raises(NeedRows) as caught:
        store.boundary(S, LayerRange(0, 3), 1, 3)
    assert caught.value.have == 2
    store.drop(S)
    assert len(store) == store.kv_used_bytes == 0


def test_bad_rows_and_ranges_are_refused_and_change_nothing() -> None:
    store = sessions(LayerRange(0, 3))
    with pytest.raises(BadTensor):
        store.run(run(S, LayerRange(0, 3), 0, ids(256)), 0.0)
    bad = Run(S, LayerRange(0, 3), 0, 2, 2, 2, ids(1))
    with pytest.raises(BadTensor):
        store.run(bad, 0.0)
    with pytest.raises(RangeNotHeld) as caught:
        store.run(run(S, WHOLE, 0, ids(1)), 0.0)
    assert caught.value.held == LayerRange(0, 3)
    assert len(store) == 0


def test_reservations_are_granted_or_busy_and_idle_sessions_make_room() -> None:
    store = sessions(kv_bytes=100 * 64 * LAYERS)
    store.run(run(S, WHOLE, 0, ids(1), reserve=80), 0.0)
    with pytest.raises(Busy):
        store.run(run(T, WHOLE, 0, ids(1), reserve=80), 1.0)
    assert len(store) == 1
    store.run(run(T, WHOLE, 0, ids(1), reserve=80), IDLE_S)
    assert (store.length(S, WHOLE), store.length(T, WHOLE)) == (0, 1)
    with pytest.raises(Busy):
        store.run(run(T, WHOLE, 1, ids(1), reserve=101), IDLE_S)


def test_one_forward_serves_all_who_wait() -> None:
    async def main() -> None:
        engine = HashEngine(SPEC, LayerRange(0, 3), step_ms=1000.0)
        _typed: Engine = engine
        out: list[Ran] = []

        async def one(i: int) -> None:
            out.append(await engine.run(run(SessionId(f"{i:032x}"), LayerRange(0, 3), 0, ids(1, 2))))

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 1)
            await trio.sleep(0.1)
            for i in range(2, 7):
                nursery.start_soon(one, i)
        assert trio.current_time() - began == pytest.approx(1.0)  # two forwards of half a second
        assert sorted(ran.batch for ran in out) == [1, 5, 5, 5, 5, 5]
        assert engine.health().sessions == 6
        assert [ran.compute_ms for ran in out] == pytest.approx([500.0] * 6)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_cancelled_leader_leaves_the_others_their_turn() -> None:
    async def main() -> None:
        engine = HashEngine(SPEC, LayerRange(0, 3), step_ms=1000.0)
        out: list[Ran] = []

        async def one(i: int) -> None:
            out.append(await engine.run(run(SessionId(f"{i:032x}"), LayerRange(0, 3), 0, ids(1))))

        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.2):
                async with trio.open_nursery() as inner:
                    inner.start_soon(one, 1)
                    await trio.testing.wait_all_tasks_blocked()
                    nursery.start_soon(one, 2)
                    nursery.start_soon(one, 3)
        assert len(out) == 2
        assert engine.health().sessions == 2
        assert engine.health().queue_depth == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_session_that_is_dropped_in_a_forward_of_others_leaves_nothing() -> None:
    async def main() -> None:
        engine = HashEngine(SPEC, LayerRange(0, 3), step_ms=1000.0)

        async def one(i: int) -> None:
            await engine.run(run(SessionId(f"{i:032x}"), LayerRange(0, 3), 0, ids(1)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 1)
            await trio.sleep(0.1)
            nursery.start_soon(one, 2)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0.6):  # in the second forward, which the one before it in the queue has begun
                await one(3)
            engine.drop(SessionId(f"{3:032x}"))
        assert engine.health().sessions == 2

        async def told() -> None:
            with pytest.raises(NeedRows):
                await one(4)

        async with (
            trio.open_nursery() as nursery
        ):  # and at the moment when it is done, which no cancelling can undo any more
            nursery.start_soon(told)
            await trio.testing.wait_all_tasks_blocked()
            engine.drop(SessionId(f"{4:032x}"))
        assert engine.health().sessions == 2

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_closing_fails_who_waits() -> None:
    async def main() -> None:
        engine = HashEngine(SPEC, LayerRange(0, 3), step_ms=1000.0)

        async def one() -> None:
            with pytest.raises(EngineFailed):
                await engine.run(run(S, LayerRange(0, 3), 0, ids(1)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(0.1)
            await engine.aclose()
        assert not engine.health().alive

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_stateless_calls_agree_with_sessions() -> None:
    async def main() -> None:
        engine = HashEngine(SPEC, WHOLE)
        rows = await engine.forward(WHOLE, ids(1, 2, 3), 3)
        logits = struct.unpack("<256f", await engine.lm_head(rows[-16:], 1))
        assert logits.index(max(logits)) == reference((1, 2, 3), 1, LAYERS)[0]
        half = await engine.forward(LayerRange(0, 3), ids(1, 2, 3), 3)
        assert await engine.forward(LayerRange(3, 6), half, 3) == rows
        with pytest.raises(BadTensor):
            await engine.lm_head(b"short", 1)

    trio.run(main)


def test_text_is_bytes() -> None:
    async def main() -> None:
        text = HashText()
        assert await text.decode(await text.encode("né 🦀")) == "né 🦀"
        assert bytes(await text.chat([{"role": "user", "content": "hi"}])) == b"user: hi\nassistant: "
        assert text.eos_ids == frozenset()
        assert await text.decode([0xF0, 0x9F]) == "\ufffd"
        await text.aclose()

    trio.run(main)


def test_who_waits_when_the_engine_closes_hears_of_it() -> None:
    async def main() -> None:
        engine = HashEngine(SPEC, WHOLE, step_ms=10.0)
        failed = []

        async def ask(session: SessionId) -> None:
            with pytest.raises(EngineFailed):
                await engine.run(run(session, WHOLE, 0, ids(1, 2)))
            failed.append(session)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, S)
            await trio.sleep(0.005)
            nursery.start_soon(ask, T)  # waits for its turn
            await trio.sleep(0.001)
            await engine.aclose()
        assert set(failed) == {S, T}

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
