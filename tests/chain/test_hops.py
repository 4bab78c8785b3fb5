"""The hop side alone: what is ignored, refused, asked for and forgotten."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest

from meshd.chain.attempts import pack_ids
from meshd.chain.courier import OUTBOX
from meshd.chain.effects import Compute, Forget, ReadLog, Send
from meshd.chain.effects import HopEffect as Effect
from meshd.chain.hop import FILL_ROWS, NEED_AGAIN_S
from meshd.chain.hops import ORPHAN_S, SILENCE_S, Failed, Held, Hops, Missing, Outcome, Rows
from meshd.chain.messages import Ask, End, Fill, Lost, Need, Phase, Progress, Reply, Step, Why
from meshd.inference.engine import Choice, Ran, Sampling
from meshd.vocabulary import Hop, LayerRange, NodeId, SessionId
from tests.chain.steps import ENTRY, MIDDLE, SESSION, STEP, A, B, C, changed


def hops() -> Hops:
    table = Hops(B)
    table.held = Held("d", LayerRange(2, 10), 7)
    return table


def compute(effects: list[Effect]) -> Compute:
    (job,) = effects
    assert isinstance(job, Compute)
    return job


def sent(effects: list[Effect]) -> list[tuple[NodeId, object]]:
    return [(effect.to, effect.message) for effect in effects if isinstance(effect, Send)]


def test_a_step_is_computed_and_passed_on() -> None:
    table = hops()
    job = compute(table.receive(STEP, A, 10.0))
    assert (job.run.start, job.run.n, job.run.emit, job.run.sampling) == (0, 3, 3, None)
    ((to, onward),) = sent(table.settle(job, Ran(rows=b"y" * 48, compute_ms=4.0), 10.5))
    assert to == C
    assert isinstance(onward, Step)
    assert (onward.plan.route, onward.plan.origin, onward.rows) == (STEP.plan.route[1:], MIDDLE, b"y" * 48)
    assert onward.remaining_ms == 4500
    assert [(t.compute_ms, t.hold_ms) for t in onward.trail] == [(4.0, 500.0)]


def test_the_exit_draws_and_replies_to_the_entry() -> None:
    table = Hops(C)
    table.held = Held("d", LayerRange(8, 12), 1)
    step = changed(STEP, route=STEP.plan.route[1:], origin=MIDDLE)
    job = compute(table.receive(step, B, 0.0))
    assert (job.run.emit, job.run.sampling) == (1, Sampling())
    choice = Choice(3, 65, 65, 1.0)
    (effect,) = table.settle(job, Ran(choices=(choice,)), 0.1)
    assert isinstance(effect, Send)
    assert (effect.to, effect.via) == (ENTRY, B)
    assert isinstance(effect.message, Reply)
    assert effect.message.choices == (choice,)


def test_doubled_and_old_steps_are_ignored() -> None:
    table = hops()
    job = compute(table.receive(STEP, A, 0.0))
    assert table.receive(STEP, A, 0.0) == []
    table.settle(job, Ran(rows=b"y" * 48), 0.0)
    assert table.receive(STEP, A, 0.0) == []
    assert table.receive(changed(STEP, attempt=0, seq=9), A, 0.0) == []
    compute(table.receive(changed(STEP, attempt=1, seq=2, start=3), A, 0.0))


def test_a_later_attempt_supersedes_what_runs() -> None:
    table = hops()
    job = compute(table.receive(STEP, A, 0.0))
    assert table.receive(changed(STEP, attempt=2, seq=2), A, 0.0) == []
    again = compute(table.settle(job, Ran(rows=b"y" * 48), 0.1))
    ((_, onward),) = sent(table.settle(again, Ran(rows=b"z" * 48), 0.2))
    assert isinstance(onward, Step)
    assert onward.attempt == 2


def test_missing_rows_are_asked_for_computed_and_kept() -> None:
    table = hops()
    late = changed(STEP, start=5, n=1, rows=b"x" * 16)
    ((to, need),) = sent(table.receive(late, A, 0.0))
    assert (to, need) == (A, Need(SESSION, 1, 1, MIDDLE, LayerRange(0, 4), 0, 5))
    behind = changed(late, seq=2, start=6)
    assert table.receive(behind, A, 0.0) == []
    assert table.receive(Fill(SESSION, 1, 1, MIDDLE, 2, 3, b""), A, 0.0) == []  # not what comes next
    assert table.receive(Fill(SESSION, 9, 1, MIDDLE, 0, 5, b""), A, 0.0) == []  # not what was asked for
    job = compute(table.receive(Fill(SESSION, 1, 1, MIDDLE, 0, 5, b"f" * 80), A, 0.0))
    assert (job.run.start, job.run.n, job.run.emit) == (0, 5, 0)
    job = compute(table.settle(job, Ran(), 0.1))
    assert job.run.start == 5
    forward, job2 = table.settle(job, Ran(rows=b"y" * 16), 0.2)
    assert isinstance(forward, Send)
    assert isinstance(forward.message, Step)
    assert forward.message.trail[-1].filled == 5
    assert isinstance(job2, Compute)
    assert job2.run.start == 6


def test_an_evicted_session_asks_again() -> None:
    table = hops()
    table.settle(compute(table.receive(STEP, A, 0.0)), Ran(rows=b"y" * 48), 0.0)
    job = compute(table.receive(changed(STEP, seq=2, start=3, n=1), A, 0.0))
    ((_, need),) = sent(table.settle(job, Missing(0), 0.0))
    assert isinstance(need, Need)
    assert (need.have, need.upto) == (0, 3)


def test_an_unanswered_need_is_repeated() -> None:
    table = hops()
    table.receive(changed(STEP, start=5), A, 0.0)
    assert table.tick(0.9) == []
    assert table.deadline() == NEED_AGAIN_S
    ((to, need),) = sent(table.tick(table.deadline()))
    assert to == A
    assert isinstance(need, Need)
    assert table.deadline() > NEED_AGAIN_S


def test_a_slow_wire_is_not_taken_for_a_need_that_was_lost() -> None:
    """Each repeated Need sends all the rest again, on the wire that is slow already."""
    table = hops()
    upto, fill_s = 10 * FILL_ROWS, 1.6 * NEED_AGAIN_S
    wire: deque[Fill] = deque()
    arrives, needs = fill_s, 0

    def send(effects: list[Effect]) -> None:
        nonlocal needs
        for _, need in sent(effects):
            if isinstance(need, Need):
                needs += 1
                for start in range(need.have, upto, FILL_ROWS):
                    wire.append(Fill(SESSION, 1, 1, MIDDLE, start, FILL_ROWS, b"f"))

    send(table.receive(changed(STEP, start=upto), A, 0.0))
    while wire:
        while (now := table.deadline()) < arrives:
            send(table.tick(now))
        for effect in table.receive(wire.popleft(), A, arrives):
            assert isinstance(effect, Compute)
            table.settle(effect, Ran(), arrives)
        arrives += fill_s
    assert needs <= 2


def test_what_answers_a_need_finds_room_where_it_waits_however_long_the_prompt_is() -> None:
    table = hops()
    upto = 2 * OUTBOX * FILL_ROWS + 100
    needs = [need for _, need in sent(table.receive(changed(STEP, start=upto), A, 0.0)) if isinstance(need, Need)]
    job: Compute | None = None
    have = most = 0
    for need in needs:  # each brings the next
        assert need.have == have
        fills = [*range(need.have, need.upto, FILL_ROWS), need.upto]
        most = max(most, len(fills) - 1)
        for start, end in pairwise(fills):
            for effect in table.receive(Fill(SESSION, 1, 1, MIDDLE, start, end - start, b"f"), A, 0.0):
                if isinstance(effect, Compute):
                    job = effect
                elif isinstance(effect, Send) and isinstance(effect.message, Need):
                    needs.append(effect.message)
        have = need.upto
    while job is not None and job.run.emit == 0:
        job = next((effect for effect in table.settle(job, Ran(), 0.0) if isinstance(effect, Compute)), None)
    assert have == upto
    assert job is not None
    assert job.run.start == upto, "the step runs when all the rows are there"
    assert most <= OUTBOX // 4, "and there is room for what else waits, or comes twice"


def test_a_need_is_answered_from_the_log_whatever_its_attempt() -> None:
    table = hops()
    table.settle(compute(table.receive(STEP, A, 0.0)), Ran(rows=b"y" * 48), 0.0)
    (read,) = table.receive(Need(SESSION, 5, 9, LayerRange(8, 12), MIDDLE, 1, 3), C, 0.0)
    assert isinstance(read, ReadLog)
    assert (read.start, read.end) == (1, 3)
    ((to, fill),) = sent(table.settle(read, Rows(b"ab" * 16), 0.0))
    assert (to, fill) == (C, Fill(SESSION, 5, 9, LayerRange(8, 12), 1, 2, b"ab" * 16))


def test_long_fills_are_cut() -> None:
    table = hops()
    table.settle(compute(table.receive(changed(STEP, n=600, rows=b"x" * 9600), A, 0.0)), Ran(rows=b"y" * 9600), 0.0)
    (read,) = table.receive(Need(SESSION, 1, 1, LayerRange(8, 12), MIDDLE, 0, 600), C, 0.0)
    assert isinstance(read, ReadLog)
    fills = [message for _, message in sent(table.settle(read, Rows(b"z" * 9600), 0.0))]
    assert [(f.start, f.n, len(f.rows)) for f in fills if isinstance(f, Fill)] == [
        (0, 256, 4096),
        (256, 256, 4096),
        (512, 88, 1408),
    ]


def test_a_log_that_is_too_short_is_filled_from_upstream() -> None:
    table = hops()
    table.settle(compute(table.receive(STEP, A, 0.0)), Ran(rows=b"y" * 48), 0.0)
    (read,) = table.receive(Need(SESSION, 1, 1, LayerRange(8, 12), MIDDLE, 0, 3), C, 0.0)
    assert isinstance(read, ReadLog)
    ((to, need),) = sent(table.settle(read, Missing(1), 0.0))
    assert (to, need) == (A, Need(SESSION, 1, 1, MIDDLE, LayerRange(0, 4), 1, 3))
    job = compute(table.receive(Fill(SESSION, 1, 1, MIDDLE, 1, 2, b"f" * 32), A, 0.0))
    (again,) = table.settle(job, Ran(), 0.0)
    assert isinstance(again, ReadLog)
    ((to, fill),) = sent(table.settle(again, Rows(b"y" * 48), 0.0))
    assert to == C
    assert isinstance(fill, Fill)


def test_a_log_that_cannot_be_read_costs_the_attempt_that_wants_it_and_nothing_that_is_held() -> None:
    """It is not an empty one: filled from upstream it would fail again, for ever."""
    table = hops()
    table.settle(compute(table.receive(STEP, A, 0.0)), Ran(rows=b"y" * 48), 0.0)
    (read,) = table.receive(Need(SESSION, 5, 9, LayerRange(8, 12), MIDDLE, 0, 3), C, 0.0)
    assert isinstance(read, ReadLog)
    ((to, lost),) = sent(table.settle(read, Failed(Why.ENGINE, "too long"), 0.0))
    assert (to, lost) == (ENTRY, Lost(SESSION, 5, B, MIDDLE, Why.ENGINE, "too long"))
    assert table.settle(read, Failed(Why.ENGINE, "too long"), 0.0) == []
    assert compute(table.receive(changed(STEP, seq=2, start=3, n=1), A, 0.0)).run.start == 3


@pytest.mark.parametrize(
    "late", [Rows(b"o" * 48), Missing(0), Failed(Why.ENGINE)], ids=lambda late: type(late).__name__
)
def test_an_answer_to_a_session_that_was_forgotten_is_none_to_the_one_that_came_after(late: Outcome) -> None:
    need = Need(SESSION, 1, 1, LayerRange(8, 12), MIDDLE, 0, 3)
    table = hops()
    table.settle(compute(table.receive(STEP, A, 0.0)), Ran(rows=b"y" * 48), 0.0)
    (old,) = table.receive(need, C, 0.0)
    assert isinstance(old, ReadLog)
    (gone,) = table.tick(SILENCE_S)
    assert isinstance(gone, Forget)
    job = compute(table.receive(STEP, A, SILENCE_S))
    assert table.settle(old, late, SILENCE_S) == []
    table.settle(job, Ran(rows=b"n" * 48), SILENCE_S)
    (new,) = table.receive(need, C, SILENCE_S)
    assert isinstance(new, ReadLog)
    assert table.settle(old, late, SILENCE_S) == []
    ((_, fill),) = sent(table.settle(new, Rows(b"n" * 48), SILENCE_S))
    assert isinstance(fill, Fill)
    assert fill.rows == b"n" * 48


def test_preparing_does_not_touch_the_running_session() -> None:
    table = hops()
    table.settle(compute(table.receive(STEP, A, 0.0)), Ran(rows=b"y" * 48), 0.0)
    prepare = changed(STEP, attempt=2, seq=2, start=3, n=0, emit=0, rows=b"")
    ((to, onward),) = sent(table.receive(prepare, A, 0.0))
    assert to == C
    assert isinstance(onward, Step)
    assert onward.n == 0
    compute(table.receive(changed(STEP, seq=3, start=3, n=1), A, 0.0))  # attempt 1 still runs


def test_preparing_fills_a_newcomer() -> None:
    table = hops()
    prepare = changed(STEP, attempt=2, seq=2, start=3, n=0, emit=0, rows=b"")
    ((to, need),) = sent(table.receive(prepare, A, 0.0))
    assert to == A
    assert isinstance(need, Need)
    job = compute(table.receive(Fill(SESSION, 2, 2, MIDDLE, 0, 3, b"f" * 48), A, 0.0))
    ((to, onward),) = sent(table.settle(job, Ran(), 0.0))
    assert to == C
    assert isinstance(onward, Step)
    assert onward.n == 0


@pytest.mark.parametrize(
    ("held", "change", "why"),
    [
        (None, {}, Why.STALE),
        (Held("other", LayerRange(2, 10), 7), {}, Why.STALE),
        (Held("d", LayerRange(2, 7), 7), {}, Why.STALE),
        (Held("d", LayerRange(2, 10), 8), {}, Why.STALE),
        (Held("d", LayerRange(2, 10), 7), {"route": (Hop(A, MIDDLE, 7), STEP.plan.route[1])}, Why.STALE),
        (Held("d", LayerRange(2, 10), 7), {"origin": LayerRange(0, 3)}, Why.STALE),
    ],
)
def test_a_step_that_does_not_fit_is_refused(held: Held | None, change: dict[str, object], why: Why) -> None:
    table = hops()
    table.held = held
    ((to, lost),) = sent(table.receive(changed(STEP, **change), A, 0.0))
    assert to == ENTRY
    assert isinstance(lost, Lost)
    assert (lost.why, lost.node) == (why, B)
    assert len(table) == 0


def test_too_many_sessions_are_refused() -> None:
    table = Hops(B, max_sessions=1)
    table.held = Held("d", LayerRange(2, 10), 7)
    table.receive(STEP, A, 0.0)
    ((_, lost),) = sent(table.receive(changed(STEP, session=SessionId("b" * 32)), A, 0.0))
    assert isinstance(lost, Lost)
    assert lost.why is Why.FULL


def test_no_new_session_while_too_many_steps_wait_and_those_that_run_go_on() -> None:
    table = Hops(B, max_computing=2)
    table.held = Held("d", LayerRange(2, 10), 7)
    table.settle(compute(table.receive(STEP, A, 0.0)), Ran(rows=b"y" * 48), 0.0)
    table.computing = 2
    ((_, lost),) = sent(table.receive(changed(STEP, session=SessionId("b" * 32)), A, 0.0))
    assert isinstance(lost, Lost)
    assert lost.why is Why.FULL
    assert compute(table.receive(changed(STEP, seq=2, start=3, n=1), A, 0.0))
    table.computing = 1
    assert compute(table.receive(changed(STEP, session=SessionId("c" * 32)), A, 0.0))


def test_an_engine_that_fails_loses_the_hop() -> None:
    table = hops()
    job = compute(table.receive(STEP, A, 0.0))
    ((to, lost),) = sent(table.settle(job, Failed(Why.ENGINE, "out of memory"), 0.0))
    assert (to, lost) == (ENTRY, Lost(SESSION, 1, B, MIDDLE, Why.ENGINE, "out of memory"))


def test_a_lost_next_hop_is_told_once() -> None:
    table = hops()
    table.settle(compute(table.receive(STEP, A, 0.0)), Ran(rows=b"y" * 48), 0.0)
    assert table.unreachable(SESSION, A, Why.RESET) == []
    ((to, lost),) = sent(table.unreachable(SESSION, C, Why.RESET))
    assert (to, lost) == (ENTRY, Lost(SESSION, 1, C, LayerRange(8, 12), Why.RESET))
    assert table.unreachable(SESSION, C, Why.REFUSED, 1) == []


def test_expired_steps_are_dropped() -> None:
    table = hops()
    job = compute(table.receive(STEP, A, 0.0))
    table.receive(changed(STEP, seq=2, start=3, n=1, remaining_ms=10), A, 0.0)
    ((_, onward),) = sent(table.settle(job, Ran(rows=b"y" * 48), 1.0))
    assert isinstance(onward, Step)
    assert onward.seq == 1


def test_where_a_step_is() -> None:
    table = hops()

    def phase(seq: int) -> tuple[Phase, int]:
        ((to, answer),) = sent(table.receive(Ask(SESSION, 1, seq), ENTRY, 0.0))
        assert to == ENTRY
        assert isinstance(answer, Progress)
        return answer.phase, answer.have

    assert phase(1) == (Phase.UNSEEN, 0)
    job = compute(table.receive(STEP, A, 0.0))
    table.receive(changed(STEP, seq=2, start=3, n=1), A, 0.0)
    assert [phase(seq) for seq in (1, 2, 3)] == [(Phase.COMPUTING, 0), (Phase.QUEUED, 0), (Phase.UNSEEN, 0)]
    job = next(e for e in table.settle(job, Ran(rows=b"y" * 48), 0.0) if isinstance(e, Compute))
    assert phase(1) == (Phase.SENT, 3)
    table.settle(job, Missing(0), 0.0)
    assert phase(2) == (Phase.NEEDING, 0)


def test_sessions_end() -> None:
    table = hops()
    table.receive(STEP, A, 0.0)
    assert table.receive(End(SESSION, 0), ENTRY, 0.0) == []  # an older route's end
    assert table.receive(End(SESSION, 1), A, 0.0) == []  # only the entry may
    assert table.receive(End(SESSION, 1), ENTRY, 0.0) == [Forget(SESSION)]
    assert table.receive(STEP, A, 0.0) == []  # still under way when it ended
    assert len(table) == 0
    compute(table.receive(changed(STEP, attempt=2), A, 0.0))


def test_silent_and_orphaned_sessions_end() -> None:
    table = hops()
    table.receive(STEP, A, 0.0)
    assert table.deadline() == SILENCE_S
    table.entry_gone(ENTRY, 5.0)
    assert table.deadline() == 5.0 + ORPHAN_S
    table.receive(Ask(SESSION, 1, 1), ENTRY, 6.0)
    assert table.tick(65.0) == []
    assert table.tick(table.deadline()) == [Forget(SESSION)]


def test_ids_are_rows() -> None:
    assert pack_ids([1, 2]) == b"\x01\0\0\0\x02\0\0\0"
