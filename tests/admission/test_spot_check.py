"""Spot checks in a room of rehearsal nodes: who breaks while it serves is found by its fellow replicas."""

from __future__ import annotations

from random import Random

import pytest
import trio
import trio.testing

from meshd.admission import spot_check
from meshd.admission.spot_check import SpotChecker
from meshd.chain.request import GenerationRequest
from meshd.node.spot_checked import SpotChecked
from meshd.vocabulary import Hop, LayerRange, Route
from tests.admission.room import FaultyStage, Room, RoomNode, engine_of, node, run, until
from tests.fakes.chain import ROUTE, FakeChain

HALF = (LayerRange(0, 6), LayerRange(6, 12))
IDS = list(b"The capital of France is")


@pytest.fixture(autouse=True)
def every_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_check, "SHARE", 1.0)


def checker(room: Room, entry: RoomNode, *, seed: int = 1) -> SpotChecker:
    prober = room.probers[entry.node_id]
    return SpotChecker(
        entry.node_id,
        room.net._up[entry.node_id],
        engine=lambda: entry.engine,
        directory=lambda: room.directory(entry.node_id),
        quarantine=prober.quarantine,
        doubt=prober.doubt,
        rng=Random(seed),
    )


def route_over(*nodes: RoomNode) -> Route:
    return tuple(Hop(n.node_id, n.engine.info.layers, 1) for n in nodes if n.engine)


def breaks(worker: RoomNode, at: int) -> None:
    """The same engine start, and from now on it skips a layer."""
    assert worker.engine is not None
    worker.engine = engine_of(worker.engine.info.layers, FaultyStage("skip", at))


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_odd_one_of_three_replicas_is_quarantined(broken: int) -> None:
    first, backs, entry = node("a", HALF[0]), [node(letter, HALF[1]) for letter in "bcd"], node("e")
    room = Room(first, *backs, entry)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: all(room.seen(entry, n).admitted for n in (first, *backs)))
            spot = checker(room, entry)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(spot.run)
                spot.consider(IDS, route_over(first, backs[0]))
                await until(lambda: spot.counters["spot_checks"] == 1)
                assert spot.counters["spot_disagreements"] == 0
                breaks(backs[broken], 8)
                while room.seen(entry, backs[broken]).admitted is not False:
                    spot.consider(IDS, route_over(first, backs[0]))
                    await trio.sleep(0.002)
                assert "than two other replicas" in room.seen(entry, backs[broken]).admission
                assert all(room.seen(entry, n).admitted for n in (first, *backs) if n is not backs[broken])
                nursery.cancel_scope.cancel()

    run(scenario)


def test_of_two_replicas_a_probe_says_who_is_wrong() -> None:
    good, bad, entry = node("a", LayerRange(0, 12)), node("b", LayerRange(0, 12)), node("e")
    room = Room(good, bad, entry)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: room.seen(entry, good).admitted and room.seen(entry, bad).admitted)
            breaks(bad, 3)
            spot = checker(room, entry)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(spot.run)
                spot.consider(IDS, route_over(good))
                await until(lambda: room.seen(entry, bad).admitted is False)
                assert room.seen(entry, good).admitted
                nursery.cancel_scope.cancel()

    run(scenario)


def test_an_entry_that_is_a_replica_itself_compares_with_its_own_engine() -> None:
    entry, bad = node("a", LayerRange(0, 12)), node("b", LayerRange(0, 12))
    room = Room(entry, bad)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: room.seen(entry, bad).admitted)
            breaks(bad, 3)
            spot = checker(room, entry)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(spot.run)
                spot.consider(IDS, route_over(entry))
                await until(lambda: room.seen(entry, bad).admitted is False)
                nursery.cancel_scope.cancel()

    run(scenario)


def test_a_layer_with_one_replica_cannot_be_checked_and_a_dead_one_is_nobodys_fault() -> None:
    only, pair, entry = node("a", HALF[0]), [node(letter, HALF[1]) for letter in "bc"], node("e")
    room = Room(only, *pair, entry)

    async def scenario() -> None:
        async with room.running():
            await until(lambda: all(room.seen(entry, n).admitted for n in (only, *pair)))
            spot = checker(room, entry)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(spot.run)
                spot.consider(IDS, route_over(only))
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert spot.counters["spot_checks"] == 0
                room.net.kill(pair[1].node_id)
                spot.consider(IDS, route_over(only, pair[0]))
                await until(lambda: spot.counters["spot_checks"] == 1)
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert all(room.seen(entry, n).admitted for n in (only, *pair))
                nursery.cancel_scope.cancel()

    run(scenario)


def test_about_one_in_a_hundred_is_checked_and_a_full_queue_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = node("a", LayerRange(0, 12))
    room = Room(entry)

    async def scenario() -> None:
        async with room.running():
            spot = checker(room, entry)
            monkeypatch.setattr(spot_check, "SHARE", 0.01)
            drawn = 0
            for _ in range(10_000):
                before = spot._put.statistics().current_buffer_used
                spot.consider(IDS, route_over(entry))
                if spot._put.statistics().current_buffer_used > before:
                    drawn += 1
                    spot._take.receive_nowait()
            assert 60 < drawn < 140
            eager = checker(room, entry)
            monkeypatch.setattr(spot_check, "SHARE", 1.0)
            for _ in range(100):
                eager.consider(IDS, route_over(entry))
            assert eager._put.statistics().current_buffer_used == 2

    run(scenario)


def test_the_chain_answers_as_it_would_without() -> None:
    seen: list[tuple[int, ...]] = []
    chain = FakeChain(ids=(5, 6, 7))
    checked = SpotChecked(chain, lambda ids, route: seen.append((*ids, len(route))))

    async def scenario() -> None:
        request = GenerationRequest(prompt=(1, 2, 3), max_tokens=3)
        async with checked.generate(request) as events:
            got = [event async for event in events]
        async with FakeChain(ids=(5, 6, 7)).generate(request) as events:
            assert [type(event) for event in got] == [type(event) async for event in events]
        assert chain.running == 0

    run(scenario)
    assert seen == [(1, 2, 3, len(ROUTE))]
