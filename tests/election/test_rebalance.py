"""Moves: what makes a room better, and what is never done."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from meshd.election.capacity import Device, Sizes, weight_budget
from meshd.election.coverage import counts, throughput
from meshd.election.rebalance import Move, best_move, still_worth
from meshd.election.settings import Settings
from meshd.vocabulary import LayerRange
from tests.election.specs import hash_spec, node, spec
from tests.election.test_elect import random_room
from tests.sim.election_room import Room

S = Settings()


def device(number: int, layers: tuple[int, int], capacity_mb: float = 200, layer_ms: float = 1.0) -> Device:
    return Device(node(number), capacity_mb, layer_ms, LayerRange(*layers))


def move(mine: Device, *others: Device, cooled: bool = True) -> Move | None:
    return best_move(Sizes(spec()), mine, others, S, cooled=cooled)


def test_a_balanced_room_rests() -> None:
    room = [device(1, (0, 15)), device(2, (15, 30)), device(3, (0, 15)), device(4, (15, 30))]
    for mine in room:
        assert move(mine, *(d for d in room if d is not mine)) is None


def test_a_spare_replica_fills_a_gap_even_before_it_has_cooled() -> None:
    got = move(device(1, (0, 15)), device(2, (0, 15)), cooled=False)
    assert got is not None
    assert (got.layers, got.why, got.leaves) == (LayerRange(15, 30), "gap", (LayerRange(0, 15),))


def test_a_third_replica_goes_where_one_is_alone_once_it_has_cooled() -> None:
    others = device(2, (0, 15)), device(3, (0, 15)), device(4, (15, 30))
    got = move(device(1, (0, 15)), *others)
    assert got is not None
    assert (got.layers, got.why) == (LayerRange(15, 30), "thin")
    assert move(device(1, (0, 15)), *others, cooled=False) is None


def test_a_last_replica_never_leaves() -> None:
    assert move(device(1, (0, 15)), device(2, (15, 30)), device(3, (15, 30))) is None


def test_a_last_replica_reloads_in_place_only_while_the_room_is_broken() -> None:
    alone = device(1, (0, 15), 330)
    got = move(alone)
    assert got is not None
    assert (got.layers, got.why, got.leaves, got.beside) == (LayerRange(0, 30), "gap", (), False)
    assert move(alone, device(2, (15, 30))) is None


def test_nobody_grows_only_to_be_half_a_replica() -> None:
    assert move(device(1, (0, 15), 900), device(2, (15, 30), 240), device(3, (0, 15), 240)) is not None, "a lane"
    assert move(device(1, (0, 15), 260), device(2, (15, 30), 260)) is None


def test_a_boundary_shifts_in_two_moves() -> None:
    model = Sizes(hash_spec(30, 100))
    wide, narrow = device(1, (0, 24), 5000 - 1), device(2, (24, 30), 5000 - 1)
    s = replace(S, lane_fraction=0.1)
    assert best_move(model, wide, [narrow], s, cooled=True) is None
    grown = best_move(model, narrow, [wide], s, cooled=True)
    assert grown is not None
    assert (grown.why, grown.leaves, grown.beside) == ("slow", (), True)
    assert grown.layers.end == 30
    assert abs(grown.layers.start - 15) <= 1
    narrow = replace(narrow, layers=grown.layers)
    shrunk = best_move(model, wide, [narrow], s, cooled=True)
    assert shrunk is not None
    assert shrunk.layers == LayerRange(0, grown.layers.start)
    wide = replace(wide, layers=shrunk.layers)
    assert best_move(model, wide, [narrow], s, cooled=True) is None
    assert best_move(model, narrow, [wide], s, cooled=True) is None


def test_a_claim_is_worth_nothing_once_another_filled_the_gap() -> None:
    sizes, mine, gap = Sizes(spec()), device(1, (0, 15)), LayerRange(15, 30)
    assert still_worth(sizes, mine, [device(2, (0, 15))], S, gap)
    taken = [device(2, (0, 15)), device(3, (15, 30)), device(4, (15, 30))]
    assert still_worth(sizes, mine, taken, S, gap) is None


def test_moves_never_uncover_never_overfill_and_come_to_an_end() -> None:
    rng = Random(6)
    moved = 0
    for _ in range(600):
        model, devices = random_room(rng)
        sizes = Sizes(model)
        held = [
            d
            for d in devices
            if d.layers is not None and model.weight_bytes(d.layers) <= weight_budget(d.capacity_mb, S)
        ]
        for step in range(60):
            index = step % len(held) if held else 0
            before = counts((d.layers for d in held if d.layers), model.num_layers)
            moves = [
                (i, best_move(sizes, d, [o for o in held if o is not d], S, cooled=True)) for i, d in enumerate(held)
            ]
            wanted = [(i, m) for i, m in moves if m is not None]
            if not wanted:
                break
            i, chosen = wanted[index % len(wanted)]
            moved += 1
            held[i] = replace(held[i], layers=chosen.layers)
            after = counts((d.layers for d in held if d.layers), model.num_layers)
            assert all(b == 0 or a > 0 for b, a in zip(before, after, strict=True))
            assert model.weight_bytes(chosen.layers) <= weight_budget(held[i].capacity_mb, S)
        else:
            raise AssertionError(f"still moving after 60 moves: {[str(d.layers) for d in held]}")
        assert min(throughput(held, model.num_layers)) >= 0
    assert moved > 50


def test_who_moves_away_still_serves_so_a_last_replica_does_not_reload() -> None:
    """Its neighbour is about to shrink to 19..30, which leaves a gap that this device could fill by dropping what it alone has.
    (Seed 541 of the churn.)"""
    mine, shrinking = device(2, (0, 15), capacity_mb=260), device(8, (19, 30), capacity_mb=260)
    now = move(mine, shrinking)
    assert now is not None
    assert (now.why, now.beside) == ("gap", False)
    assert best_move(Sizes(spec()), mine, [shrinking], S, cooled=True, answers=True) is None
    assert still_worth(Sizes(spec()), mine, [shrinking], S, now.layers, answers=True) is None


def test_an_engine_that_offers_less_than_it_has_loaded_still_takes_its_memory() -> None:
    sizes, loaded = Sizes(hash_spec(30, 30)), LayerRange(0, 24)
    mine, room = device(1, (0, 5), 1000), [device(2, (0, 20))]
    for of_more, beside in ((None, True), (loaded, False)):
        got = still_worth(sizes, mine, room, S, LayerRange(20, 30), loaded=of_more)
        assert got is not None
        assert (got.why, got.beside) == ("gap", beside)
    back = still_worth(sizes, mine, [device(2, (0, 5)), device(3, (20, 30))], S, LayerRange(0, 20), loaded=loaded)
    assert back is not None
    assert back.beside, "what is loaded is there at once"


def test_an_elector_knows_what_its_engine_has_loaded() -> None:
    """Each shrinks in place when somebody else has come for the rest, and then counts with the memory of the wider range."""
    room = Room(hash_spec(30, 10), seed=1)
    for number in range(1, 5):
        room.join(number, 300)
        room.run(40.0)
    room.run(600.0)
    held = {each.number: (each.elector.held, each.elector._loaded) for each in room.alive()}
    low, high, wide = LayerRange(0, 15), LayerRange(15, 30), LayerRange(0, 24)
    assert held == {1: (low, wide), 2: (high, high), 3: (low, wide), 4: (high, high)}
    room.crash(1)
    room.run(30.0)
    assert room.nodes[node(1)].elector._loaded == room.nodes[node(1)].elector.held


def test_a_range_beyond_the_models_end_is_somebodys_word_and_stops_no_election() -> None:
    sizes = Sizes(hash_spec(30, 10))
    for told in ((0, 99), (40, 50), (30, 31), (15, 70_000)):
        mine, others = device(1, (0, 10), 300), [device(2, told), device(3, (0, 10))]
        got = best_move(sizes, mine, others, S, cooled=True)
        assert got is None or got.layers.end <= 30
        assert still_worth(sizes, mine, others, S, LayerRange(10, 30)) is not None or told[0] in (0, 15)
