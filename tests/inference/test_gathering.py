"""When a tick begins: who is waited for, for how long, and that nobody alone ever is."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from meshd.inference.batch import BLOCK_ROWS, STALL_MS, Batcher, chunk_rows
from meshd.inference.gathering import SHARE, SHARE_AFAR, Gathering

STEP_S = 0.020


class Engine:
    """A stage that computes a tick in `STEP_S` whoever is in it. ``back_s`` gives when an answered session's next step comes."""

    def __init__(self, sessions: int, back_s: list[float]) -> None:
        self.gathering = Gathering()
        self.now = 0.0
        self.back_s = back_s
        self.coming: list[tuple[float, int]] = [(0.0, session) for session in range(sessions)]
        self.here: list[int] = []
        self.batches: list[int] = []
        self.waited_s = 0.0

    def _take(self, until: float) -> bool:
        arrived = sorted(pair for pair in self.coming if pair[0] <= until)
        self.coming = [pair for pair in self.coming if pair[0] > until]
        for at, session in arrived:
            self.gathering.arrived(session, at)
            self.here.append(session)
        return bool(arrived)

    def tick(self) -> None:
        if not self.here:
            self.now = max(self.now, min(at for at, _ in self.coming))
        self._take(self.now)
        while (wait_s := self.gathering.wait_s(self.now, len(self.here))) > 0.0:
            nearest = min((at for at, _ in self.coming), default=self.now + wait_s)
            until = min(self.now + wait_s, max(nearest, self.now))
            self.waited_s += until - self.now
            self.now = until
            if not self._take(self.now) and until < nearest:
                break
        batch, self.here = self.here, []
        self.now += STEP_S
        self.gathering.ticked(batch, self.now, STEP_S, alone=True)
        self.batches.append(len(batch))
        self.coming += [(self.now + self.back_s[place], session) for place, session in enumerate(batch)]


def test_those_who_come_straight_back_become_one_batch() -> None:
    engine = Engine(8, [0.0004 + 0.0002 * place for place in range(8)])
    engine.here, engine.coming = [0], [(0.001 * place, place) for place in range(1, 8)]
    for _ in range(30):
        engine.tick()
    assert engine.batches[-10:] == [8] * 10
    assert engine.waited_s < 30 * SHARE * STEP_S * 1.001


def test_batches_that_alternate_with_another_stage_stay_whole_and_are_not_waited_for() -> None:
    other_s = STEP_S + 0.001
    engine = Engine(8, [other_s + 0.0001 * place for place in range(8)])
    engine.here, engine.coming = [0, 1, 2, 3], [(0.001 + 0.0001 * place, place) for place in range(4, 8)]
    for _ in range(20):
        engine.tick()
    before = engine.waited_s
    for _ in range(20):
        engine.tick()
    assert set(engine.batches[-20:]) == {4}
    assert engine.waited_s - before < 20 * 0.001, "only for the rest of a batch that has begun to arrive"


class Chain:
    """Two stages that take a step's time plus a little for each session, and sessions that go round."""

    def __init__(self, sessions: int) -> None:
        self.stages = [Gathering(), Gathering()]
        self.here: list[list[int]] = [list(range(sessions)), []]
        self.free = [0.0, 0.0]
        self.moving: list[tuple[float, int, int]] = []  # when, stage, session
        self.batches: list[list[int]] = [[], []]
        self.tokens = 0

    def run(self, until: float) -> None:
        now = 0.0
        while now < until:
            for at, stage, session in sorted(move for move in self.moving if move[0] <= now):
                self.stages[stage].arrived(session, at)
                self.here[stage].append(session)
            self.moving = [move for move in self.moving if move[0] > now]
            for stage in (0, 1):
                waiting, gathering = self.here[stage], self.stages[stage]
                if not waiting or self.free[stage] > now or gathering.wait_s(now, len(waiting)) > 0.0:
                    continue
                count = gathering.share(now, len(waiting))
                batch, self.here[stage] = waiting[:count], waiting[count:]
                took = STEP_S * (1 + len(batch) / 8)
                self.free[stage] = now + took
                gathering.ticked(batch, now + took, took, alone=True)
                self.batches[stage].append(len(batch))
                self.moving += [(now + took + 0.0005, 1 - stage, session) for session in batch]
                self.tokens += stage * len(batch)
            now += 0.00025


def test_sessions_in_step_are_parted_until_both_stages_work_at_once() -> None:
    chain = Chain(8)
    chain.run(3.0)
    assert chain.batches[0][0] == 8
    assert set(chain.batches[0][-20:]) == {4} == set(chain.batches[1][-20:])
    in_step = 8 * 3.0 / (2 * STEP_S * 2 + 0.001)
    assert chain.tokens > 1.25 * in_step


def test_who_decodes_alone_is_not_kept_waiting() -> None:
    for back_s in (0.0005, 0.050):
        engine = Engine(1, [back_s])
        for _ in range(10):
            engine.tick()
        assert engine.waited_s == 0.0


@given(st.integers(0, 2**32), st.integers(1, 12))
@example(10822, 9)  # while it waited, slow ones came: they were waited for as long again
def test_a_wait_is_a_share_of_a_step_whatever_comes(seed: int, sessions: int) -> None:
    rng = random.Random(seed)
    engine = Engine(sessions, [rng.choice([0.0003, 0.002, 0.03, 0.2]) * rng.random() for _ in range(sessions)])
    for _ in range(40):
        before = engine.waited_s
        engine.tick()
        assert engine.waited_s - before <= SHARE_AFAR * STEP_S + 1e-9


def test_a_chunk_beside_decoders_takes_about_as_long_as_they_do() -> None:
    assert chunk_rows(100.0, 128) == 128
    assert chunk_rows(100.0, 128, 60.0) == 32
    assert chunk_rows(30.0, 128, 40.0) == 128
    assert chunk_rows(1000.0, 128, 1.0) == BLOCK_ROWS, "a prompt goes on however fast the others are"
    assert chunk_rows(100.0, 512, 1e6) == chunk_rows(100.0, 512) <= 64 * STALL_MS / 100.0


def test_company_is_known_between_steps_and_ends() -> None:
    gathering = Gathering()
    assert not gathering.in_company(0.0)
    gathering.ticked(["a"], 1.0, 0.02, alone=True)
    gathering.ticked([], 1.03, 0.03, alone=False)
    assert gathering.in_company(1.05)
    assert not gathering.in_company(1.2)
    assert gathering.step_s == 0.02


def test_a_batcher_takes_no_more_decoders_than_it_is_told() -> None:
    batcher: Batcher[int] = Batcher()
    for tag in range(5):
        batcher.offer(tag, f"s{tag}", start=9, n=1, emit=1)
    assert [piece.tag for piece in batcher.take(decoding=3)] == [0, 1, 2]
    assert [piece.tag for piece in batcher.take(decoding=3)] == [3, 4]


def test_the_batcher_knows_who_decodes() -> None:
    batcher: Batcher[int] = Batcher()
    batcher.offer(1, "a", start=0, n=1, emit=1)
    batcher.offer(2, "b", start=0, n=100, emit=1)
    assert batcher.decoding == 1
    batcher.take()
    assert batcher.decoding == 0
