from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.errors import Busy
from meshd.inference.batch import Batcher, Limits, Slice, chunk_rows

LIMITS = Limits(max_batch=4, short_rows=4, prefill_rows=32, block_rows=8, max_queue=1000)


def drain(batcher: Batcher[int]) -> list[list[Slice[int]]]:
    ticks = []
    while len(batcher):
        tick = batcher.take()
        assert tick, "work waits, but nothing was taken"
        ticks.append(tick)
    return ticks


def test_decode_steps_run_together_with_one_chunk() -> None:
    batcher: Batcher[str] = Batcher(LIMITS)
    batcher.offer("prompt", "p", start=0, n=100, emit=1)
    batcher.offer("a", "a", start=10, n=1, emit=1)
    batcher.offer("b", "b", start=20, n=3, emit=3)
    first = batcher.take()
    assert first == [Slice("a", 0, 1, 1, True), Slice("b", 0, 3, 3, True), Slice("prompt", 0, 32, 0, False)]


def test_long_prompt_is_answered_once_with_its_last_rows() -> None:
    batcher: Batcher[int] = Batcher(LIMITS)
    batcher.offer(1, "s", start=5, n=70, emit=40)
    slices = [tick[0] for tick in drain(batcher)]
    assert [s.last for s in slices] == [False] * (len(slices) - 1) + [True]
    assert sum(s.n for s in slices) == 70
    assert sum(s.emit for s in slices) == 40
    assert all((5 + s.first + s.n) % 8 == 0 for s in slices[:-1])


def test_decoders_do_not_starve_a_prompt_nor_a_prompt_decoders() -> None:
    batcher: Batcher[int] = Batcher(LIMITS)
    batcher.offer(0, "prompt", start=0, n=320, emit=1)
    tag = 1
    prompt_ticks = 0
    while batcher.of_session("prompt"):
        for name in "abcdef":  # more decoders than places, for ever
            if not batcher.of_session(name):
                batcher.offer(tag, name, start=9, n=1, emit=1)
                tag += 1
        tick = batcher.take()
        assert sum(s.n for s in tick if s.tag == 0) == 32
        assert len(tick) == LIMITS.max_batch
        prompt_ticks += 1
    assert prompt_ticks == 10


def test_queue_is_bounded_in_runs_and_bytes() -> None:
    batcher: Batcher[int] = Batcher(Limits(max_queue=2, max_queue_bytes=100))
    batcher.offer(0, "a", start=0, n=1, emit=1, size_bytes=500)  # alone, even a large one is taken
    with pytest.raises(Busy):
        batcher.offer(1, "b", start=0, n=1, emit=1, size_bytes=1)
    batcher.remove(0)
    batcher.offer(1, "b", start=0, n=1, emit=1, size_bytes=1)
    batcher.offer(2, "c", start=0, n=1, emit=1, size_bytes=1)
    with pytest.raises(Busy):
        batcher.offer(3, "d", start=0, n=1, emit=1)
    assert batcher.remove(1) is True
    assert batcher.remove(1) is False
    assert [s.tag for tick in drain(batcher) for s in tick] == [2]


def test_chunks_shrink_on_slow_devices_to_whole_blocks() -> None:
    assert [chunk_rows(ms, 128) for ms in (0.0, 100.0, 250.0, 400.0, 5000.0)] == [128, 128, 128, 64, 32]
    assert chunk_rows(1.0, 16) == 16
    batcher: Batcher[int] = Batcher(LIMITS)
    batcher.offer(0, "s", start=0, n=100, emit=1)
    assert [batcher.take(16)[0].n, batcher.take(500)[0].n, batcher.take()[0].n] == [16, 32, 32]


def test_limits_without_room_for_both_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="room"):
        Limits(max_batch=1)


runs = st.lists(
    st.tuples(
        st.integers(0, 5),  # session
        st.integers(0, 200),  # start
        st.integers(0, 150),  # n
        st.integers(0, 150),  # emit
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(runs, st.integers(2, 6), st.integers(1, 64), st.integers(1, 16))
def test_order_budget_and_progress(work: list[tuple[int, int, int, int]], batch: int, rows: int, block: int) -> None:
    limits = Limits(max_batch=batch, short_rows=4, prefill_rows=rows, block_rows=block)
    batcher: Batcher[int] = Batcher(limits)
    for tag, (session, start, n, emit) in enumerate(work):
        batcher.offer(tag, session, start=start, n=n, emit=min(emit, n))
    seen: dict[int, int] = {}
    finished: dict[int, list[int]] = {}
    emitted: dict[int, int] = {}
    for tick in drain(batcher):
        assert len(tick) <= batch
        sessions = [work[s.tag][0] for s in tick]
        assert len(set(sessions)) == len(sessions), "one slice per session and tick"
        left = {s.tag: work[s.tag][2] - seen.get(s.tag, 0) for s in tick}
        assert sum(s.n for s in tick if left[s.tag] > limits.short_rows) <= rows
        for s in tick:
            assert s.first == seen.get(s.tag, 0)
            seen[s.tag] = s.first + s.n
            emitted[s.tag] = emitted.get(s.tag, 0) + s.emit
            if s.last:
                finished.setdefault(work[s.tag][0], []).append(s.tag)
    assert seen == {tag: n for tag, (_, _, n, _) in enumerate(work)}
    assert emitted == {tag: min(emit, n) for tag, (_, _, n, emit) in enumerate(work)}
    for tags in finished.values():
        assert tags == sorted(tags), "runs of a session keep their order"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 6), st.integers(2, 5))
def test_no_session_starves(decoders: int, prompts: int, batch: int) -> None:
    """With endless work everywhere, every session is served within one round of its kind."""
    limits = Limits(max_batch=batch, short_rows=4, prefill_rows=8, block_rows=8, max_queue=1000)
    batcher: Batcher[int] = Batcher(limits)
    sizes = {f"d{i}": 1 for i in range(decoders)} | {f"p{i}": 400 for i in range(prompts)}
    owner: dict[int, str] = {}
    last = dict.fromkeys(sizes, 0)
    # One place may be kept for a chunk; a chunk may use the whole budget of a tick.
    bound = -(-decoders // (batch - 1)) + prompts + 1
    for now in range(1, 60):
        for name, n in sizes.items():
            if not batcher.of_session(name):
                tag = len(owner)
                owner[tag] = name
                batcher.offer(tag, name, start=0, n=n, emit=1)
        for s in batcher.take():
            last[owner[s.tag]] = now
        assert all(now - then <= bound for then in last.values())
