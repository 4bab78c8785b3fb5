"""Probes in a room of rehearsal nodes: who is let in, who is not, and when."""

from __future__ import annotations

import errno

import pytest
import trio
import trio.testing

from meshd.admission.expected import Expected, RehearsalModel
from meshd.errors import BadTensor
from meshd.inference.hash_engine import HashEngine
from meshd.inference.hash_stage import HashStage
from meshd.vocabulary import LayerRange
from tests.admission.room import SPEC, FaultyStage, Room, StaleStage, engine_of, node, run, until

HALF = (LayerRange(0, 6), LayerRange(6, 12))
WHOLE = LayerRange(0, 12)


def test_honest_nodes_admit_each_other_and_entries_judge_too() -> None:
    a, b, c, entry = node("a", HALF[0]), node("b", HALF[1]), node("c", WHOLE), node("e")
    room = Room(a, b, c, entry)

    async def scenario() -> None:
        async with room.running():
            for judge in room.nodes:
                await until(lambda: all(room.seen(judge, of).admitted for of in (a, b, c)))  # noqa: B023  # awaited here
            assert room.seen(a, entry).admitted is None
            assert {name for n in room.nodes for name, _ in n.events} == {"admit"}
            assert all(not n.engine.health().sessions for n in (a, b, c) if n.engine), "probes leave nothing behind"
            assert room.seen(entry, c).admission == "probed"

    run(scenario)


def test_a_joiner_is_probed_by_everybody_at_once() -> None:
    """The queue at a joiner loses nobody: no prober has to come again later."""
    peers = [node(letter, WHOLE) for letter in "abcdef"]
    joiner = node("9", HALF[0])
    joiner.entered = False
    room = Room(*peers, joiner)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: all(room.seen(x, y).admitted for x in peers for y in peers if x is not y))
            missed = sum(prober.counters["probes_missed"] for prober in room.probers.values())
            joiner.entered = True
            room.changed()
            await until(lambda: all(room.seen(peer, joiner).admitted for peer in peers))
            assert sum(prober.counters["probes_missed"] for prober in room.probers.values()) == missed
            assert room.servers[joiner.node_id].answered == len(peers)

    run(scenario)


FAULTS = [
    *[FaultyStage("skip", at) for at in (0, 5, 11)],
    *[FaultyStage("double", at) for at in (0, 10)],
    *[FaultyStage("swap", at) for at in (0, 7, 10)],
    FaultyStage("shift"),
    StaleStage(),
    HashStage(SPEC.num_layers, seed=7),  # another revision under this one's name
]


@pytest.mark.parametrize("stage", FAULTS, ids=lambda stage: f"{type(stage).__name__}-{vars(stage).get('_fault', '')}")
def test_a_stage_that_computes_something_else_is_refused(stage: HashStage) -> None:
    judge, broken = node("a"), node("b", WHOLE, stage)
    room = Room(judge, broken)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: room.seen(judge, broken).admitted is False)
            assert room.seen(judge, broken).admission
            assert not room.seen(judge, broken).routable
            assert [name for name, _ in judge.events] == ["quarantine"]

    run(scenario)


def test_another_engine_start_is_another_subject() -> None:
    judge, worker = node("a"), node("b", WHOLE, FaultyStage("skip", 3))
    room = Room(judge, worker)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: room.seen(judge, worker).admitted is False)
            worker.engine = engine_of(WHOLE, generation=2)
            room.changed()
            assert room.seen(judge, worker).admitted is None
            await until(lambda: room.seen(judge, worker).admitted)

    run(scenario)


def test_a_probe_for_an_engine_that_is_gone_is_no_verdict() -> None:
    """The advert is older than the engine: refused by number, tried again, and right once the advert has caught up."""
    judge, worker = node("a"), node("b", WHOLE)
    room = Room(judge, worker)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: room.seen(judge, worker).admitted)
            worker.engine, worker.claimed_generation = engine_of(WHOLE, generation=9), 8
            room.changed()
            await until(lambda: room.probers[judge.node_id].counters["probes_missed"])
            assert room.seen(judge, worker).admitted is None
            assert "number 9, not 8" in room.seen(judge, worker).admission
            worker.claimed_generation = None
            room.changed()
            await until(lambda: room.seen(judge, worker).admitted)

    run(scenario)


def test_without_an_expectation_nobody_is_judged_and_the_reason_is_said() -> None:
    judge, worker = node("a"), node("b", WHOLE)
    known, judge.expected = judge.expected, None
    room = Room(judge, worker)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: "no qspec" in room.seen(judge, worker).admission)
            assert room.seen(judge, worker).admitted is None
            judge.expected = known
            await until(lambda: room.seen(judge, worker).admitted)

    run(scenario)


def test_a_node_that_restarts_as_its_probe_begins_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be probed was its former run's, and what is known of it now is the new one's, which holds nothing yet."""
    judge, worker = node("a"), node("b", WHOLE)
    room = Room(judge, worker)
    book = room.books[judge.node_id]
    deadline = book.deadline

    def restarted(digest: str) -> float:
        """The last that is asked before the probe's task begins."""
        if worker.epoch == 1 and book._out:
            worker.epoch, worker.engine = 2, None
            room.build(room.rosters[judge.node_id])
        return deadline(digest)

    monkeypatch.setattr(book, "deadline", restarted)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: worker.epoch == 2)
            worker.engine = engine_of(WHOLE)
            room.changed()
            await until(lambda: room.seen(judge, worker).admitted)
            assert [name for name, _ in judge.events] == ["admit"]

    run(scenario)


def test_a_full_disk_while_the_expectation_is_brought_costs_a_probe_and_not_the_node() -> None:
    judge, worker = node("a"), node("b", WHOLE)
    known = judge.expectations
    full = True

    async def expectations(digest: str) -> Expected:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return await known(digest)

    judge.expectations = expectations  # type: ignore[method-assign]
    room = Room(judge, worker)

    async def scenario() -> None:
        nonlocal full
        async with room.running():
            await until(lambda: "could not be made" in room.seen(judge, worker).admission)
            assert room.seen(judge, worker).admitted is None
            full = False
            await until(lambda: room.seen(judge, worker).admitted)

    run(scenario)


def test_a_node_found_wrong_later_is_out_until_it_passes_again() -> None:
    judge, worker = node("a"), node("b", WHOLE)
    room = Room(judge, worker)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: room.seen(judge, worker).admitted)
            room.probers[judge.node_id].quarantine(worker.node_id, "rows that are not finite")
            assert room.seen(judge, worker).admitted is False
            assert room.seen(judge, worker).admission == "rows that are not finite"
            assert judge.events[-1][0] == "quarantine"
            assert room.probers[judge.node_id].counters["quarantined"] == 1
            room.probers[judge.node_id].quarantine(worker.node_id, "again")
            assert room.probers[judge.node_id].counters["quarantined"] == 1

    run(scenario)


def test_a_frozen_node_is_neither_admitted_nor_refused_and_others_are_not_held_up() -> None:
    judge, frozen, fine = node("a"), node("b", WHOLE), node("c", WHOLE)
    room = Room(judge, frozen, fine)

    async def scenario() -> None:
        room.net.freeze(frozen.node_id)
        async with room.running():
            await until(lambda: room.seen(judge, fine).admitted)
            assert room.seen(judge, frozen).admitted is None
            assert not room.probers[judge.node_id].counters["probes_missed"], "its probe was not waited for"
            room.net.thaw(frozen.node_id)
            await until(lambda: room.seen(judge, frozen).admitted)

    run(scenario)


def test_a_slow_device_is_given_the_time_that_its_layers_take() -> None:
    """Seven forwards of ten seconds each: a small board with layers of a large model."""
    slow, entry = node("a"), node("b")
    slow.engine = HashEngine(SPEC, SPEC.whole, generation=1, step_ms=10_000.0)
    room = Room(slow, entry)

    async def scenario() -> None:
        async with room.running(limit_s=400.0):
            await until(lambda: room.seen(entry, slow).admitted)

    trio.run(scenario, clock=trio.testing.MockClock(rate=200.0))
    assert room.probers[entry.node_id].counters["probes_missed"] == 0


def test_with_admission_off_everybody_is_taken_at_their_word() -> None:
    judge, broken = node("a"), node("b", WHOLE, FaultyStage("skip", 3))
    room = Room(judge, broken, enabled=False)

    async def scenario() -> None:
        async with room.running():
            await trio.testing.wait_all_tasks_blocked()
            assert room.seen(judge, broken).admitted
            assert room.servers[broken.node_id].answered == 0

    run(scenario)


def test_the_rehearsal_model_has_one_dtype() -> None:
    from random import Random

    with pytest.raises(BadTensor):
        RehearsalModel(4, 0).cases(LayerRange(0, 4), "bf16", Random(1))
