"""Who takes what: budgets, gaps, targets, speeds, ties."""

from __future__ import annotations

import math
from random import Random

import pytest

from meshd.election.capacity import (
    Device,
    Sizes,
    capacity_for,
    check_fit,
    lane_budget,
    measured_capacity_mb,
    weight_budget,
)
from meshd.election.coverage import counts, deficit, runs_at_most
from meshd.election.elect import assign, decide, elect, participants, smallest_layer_mb
from meshd.election.plan import plan
from meshd.election.settings import Settings
from meshd.errors import DoesNotFit
from meshd.vocabulary import MB, LayerRange, ModelSpec
from tests.election.specs import advert, hash_spec, node, spec

S = Settings()


def test_what_a_device_may_use() -> None:
    assert measured_capacity_mb(4096) == 4096 - 330 - 256
    assert measured_capacity_mb(100) == 0
    assert measured_capacity_mb(math.nan) == 0
    assert weight_budget(1000, S) == 800 * MB
    assert lane_budget(1000, S) == 600 * MB
    for odd in (math.nan, math.inf, -5.0, 0.0):
        assert weight_budget(odd, S) == 0
        assert lane_budget(odd, S) == 0
    for needed in (1, MB, 4375 * MB, 4375 * MB + 1):
        capacity = capacity_for(needed, S)
        assert weight_budget(capacity, S) >= needed > weight_budget(capacity - 1, S)


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_agree_with_the_model_and_reach_is_maximal(tied: bool) -> None:
    rng = Random(2)
    for _ in range(300):
        model = spec(
            tuple(rng.uniform(0.5, 9) for _ in range(rng.randrange(1, 12))),
            embed_mb=rng.choice([0.0, 5.0, 40.0]),
            head_mb=rng.choice([40.0, 41.0]),
            tied=tied,
        )
        sizes, count = Sizes(model), model.num_layers
        start = rng.randrange(count)
        limit = rng.randrange(start + 1, count + 1)
        budget = int(rng.uniform(0, 120) * MB)
        assert all(
            sizes.bytes(a, b) == model.weight_bytes(LayerRange(a, b))
            for a in range(count)
            for b in range(a + 1, count + 1)
        )
        end = sizes.reach(start, budget, limit)
        fitting = [e for e in range(start + 1, limit + 1) if sizes.bytes(start, e) <= budget]
        assert end == max(fitting, default=start)


def random_room(rng: Random) -> tuple[ModelSpec, list[Device]]:
    layer_mb = tuple(rng.choice([1.0, 2.0, rng.uniform(0.1, 30.0)]) for _ in range(rng.randrange(1, 24)))
    tied = rng.random() < 0.5
    embed = rng.choice([0.0, 3.0, 50.0])
    model = spec(layer_mb, embed_mb=embed, head_mb=embed + 0.1 if tied else rng.choice([0.0, 3.0, 50.0]), tied=tied)
    scale = sum(layer_mb) * rng.choice([0.1, 0.3, 1.0, 3.0])
    devices = []
    for i in range(rng.randrange(1, 9)):
        capacity = rng.choice([rng.uniform(0, scale), rng.uniform(0, scale), 0.0, math.nan, math.inf, -1.0])
        layers = None
        if rng.random() < 0.3 and len(layer_mb) > 1:
            first, last = sorted(rng.sample(range(len(layer_mb) + 1), 2))
            layers = LayerRange(first, last)
        devices.append(Device(node(i), capacity, rng.choice([1.0, 2.0, rng.uniform(0.1, 9.0)]), layers))
    return model, devices


def test_ten_thousand_random_rooms() -> None:
    rng = Random(1)
    for _ in range(10_000):
        model, devices = random_room(rng)
        free = [d for d in devices if d.layers is None]
        decisions = assign(model, devices, S)
        assert set(decisions) == {d.node_id for d in free}
        held = [d.layers for d in devices if d.layers] + [d.layers for d in decisions.values() if d.layers]
        gaps = runs_at_most(counts(held, model.num_layers), 0)
        for device in free:
            decision, budget = decisions[device.node_id], weight_budget(device.capacity_mb, S)
            fits_any = any(model.weight_bytes(LayerRange(i, i + 1)) <= budget for i in range(model.num_layers))
            if decision.layers is None:
                assert not fits_any
                assert decision.short_mb > 0
                known = device.capacity_mb if math.isfinite(device.capacity_mb) else 0.0
                enough = max(known, 0.0) + decision.short_mb
                assert weight_budget(enough, S) >= min(
                    model.weight_bytes(LayerRange(i, i + 1)) for i in range(model.num_layers)
                )
                continue
            assert fits_any
            assert model.weight_bytes(decision.layers) <= budget
            assert decision.layers.end <= model.num_layers
            if decision.why != "gap":  # whoever strengthens could not have filled what is missing
                assert not any(
                    model.weight_bytes(LayerRange(i, i + 1)) <= budget
                    for gap in gaps
                    for i in range(gap.start, gap.end)
                )


def test_the_order_in_which_nodes_are_heard_of_changes_nothing() -> None:
    rng = Random(4)
    for _ in range(200):
        model, devices = random_room(rng)
        shuffled = list(devices)
        rng.shuffle(shuffled)
        assert assign(model, devices, S) == assign(model, shuffled, S)


def test_a_device_alone_takes_the_lane_or_the_widest_start() -> None:
    assert elect(spec(), [advert(1, 1000)], node(1), S) == LayerRange(0, 30)
    assert elect(spec(), [advert(1, 150)], node(1), S) == LayerRange(0, 9)
    assert elect(spec(), [advert(1, 330)], node(1), S) == LayerRange(0, 30), "it fits, if not as a lane"


def test_a_gap_is_filled_before_anything_else() -> None:
    room = [advert(1, 200, (0, 15)), advert(2, 200, (0, 15)), advert(3, 200)]
    assert elect(spec(), room, node(3), S) == LayerRange(15, 30)


def test_the_thinner_half_is_strengthened() -> None:
    room = [advert(1, 200, (0, 15)), advert(2, 200, (0, 15)), advert(3, 200, (15, 30)), advert(4, 200)]
    decision = decide(spec(), participants(room, "d"), node(4), S)
    assert (decision.layers, decision.why) == (LayerRange(15, 30), "thin")


def test_strengthening_keeps_to_the_ranges_of_others() -> None:
    room = [advert(1, 260, (0, 15)), advert(2, 260, (15, 30)), advert(3, 260)]
    assert elect(spec(), room, node(3), S) in (LayerRange(0, 15), LayerRange(15, 30))


def test_what_is_being_loaded_counts() -> None:
    room = [advert(1, 200, (0, 15)), advert(2, 200, loading=(15, 30)), advert(3, 200, (15, 30)), advert(4, 200)]
    assert elect(spec(), room, node(4), S) == LayerRange(0, 15)


def test_with_every_target_met_the_slowest_is_strengthened() -> None:
    slow = [advert(i, 200, (15, 30), layer_ms=4.0) for i in (1, 2)]
    room = [*slow, *(advert(i, 200, (0, 15)) for i in (3, 4)), advert(5, 200)]
    decision = decide(spec(), participants(room, "d"), node(5), S)
    assert (decision.layers, decision.why) == (LayerRange(15, 30), "extra")


def test_staying_put() -> None:
    room = [advert(1, 200, (0, 15)), advert(2, 200, (15, 30))]
    assert elect(spec(), room, node(1), S) == LayerRange(0, 15)
    with pytest.raises(KeyError):
        elect(spec(), room, node(9), S)


def test_other_models_do_not_count() -> None:
    room = [advert(1, 200, (0, 15)), advert(2, 200, (15, 30), digest="other"), advert(3, 200)]
    assert elect(spec(), room, node(3), S) == LayerRange(15, 30)


def test_a_device_too_small_for_one_layer_hears_how_many_mb_are_missing() -> None:
    decision = decide(spec(), participants([advert(1, 5)], "d"), node(1), S)
    assert decision.layers is None
    assert decision.why == "small"
    assert decision.short_mb == smallest_layer_mb(spec(), S) - 5 == 4


def test_two_to_one_speeds_with_equal_memory_give_two_to_one_layers() -> None:
    got = plan(spec(), [300, 300], S, speeds=[2, 1])
    widths = [len(seat.layers) for seat in got.seats if seat.layers]
    assert got.covered
    assert abs(widths[0] - 20) <= 1
    assert sum(widths) == 30
    three = plan(hash_spec(40, 100), [2000] * 3, S, speeds=[1, 1, 2])
    assert [len(seat.layers) for seat in three.seats if seat.layers] == [12, 12, 16], "16 is all the memory allows"


def test_a_budget_comes_before_a_speed() -> None:
    got = plan(hash_spec(30, 10), [150, 300], S, speeds=[9, 1])
    widths = [len(seat.layers) for seat in got.seats if seat.layers]
    assert widths == [12, 18]


def test_four_equal_devices_make_two_aligned_pairs() -> None:
    got = plan(spec(), [200] * 4, S, speeds=[1.0, 1.05, 0.97, 1.02])
    assert deficit(counts([s.layers for s in got.seats if s.layers], 30), 2) == 0
    assert len({seat.layers for seat in got.seats}) == 2


def test_the_remainder_never_goes_to_the_tightest_device() -> None:
    got = plan(hash_spec(60, 6656), [gib * 1024 for gib in (118, 118, 236, 20)], Settings(kv_reserve=0.0))
    assert got.covered
    for seat in got.seats:
        assert seat.weight_mb <= seat.capacity_mb


def test_a_room_too_small_says_how_many_mb_short_and_that_much_more_covers() -> None:
    budgets = Settings(kv_reserve=0.0)
    model = hash_spec(80, 4375)
    short = plan(model, [128_000, 80_000, 80_000], budgets)
    assert not short.covered
    assert short.short_mb == 15 * 4375
    assert plan(model, [128_000, 80_000, 80_000, 120_000], budgets).covered
    assert plan(model, [128_000, 80_000, 80_000, short.short_mb], budgets).covered
    with_kv = plan(model, [128_000, 80_000, 80_000], S)
    assert with_kv.short_mb >= 29 * 4375 / 0.8


def test_without_one_device() -> None:
    got = plan(spec(), [200, 200, 200], S, without=None)
    sole = next(seat.index for seat in got.seats if seat.layers in got.single)
    broken = plan(spec(), [200, 200, 200], S, without=sole)
    assert broken.missing == got.single
    assert broken.short_mb > 0
    assert len(broken.seats) == 2
    spare = next(seat.index for seat in got.seats if seat.layers not in got.single)
    assert plan(spec(), [200, 200, 200], S, without=spare).covered


def test_two_hundred_devices_in_one_instant_meet_every_target() -> None:
    got = plan(spec(), [120 + i % 90 for i in range(200)], S, speeds=[1 + i % 3 for i in range(200)])
    assert deficit(counts([s.layers for s in got.seats if s.layers], 30), 2) == 0


def test_a_pinned_range_that_does_not_fit_is_refused_with_the_figures() -> None:
    check_fit(spec(), LayerRange(0, 15), 200, S)
    with pytest.raises(DoesNotFit, match=r"layers 0\.\.15 of m need 195 MB .* has 150: 45 MB short"):
        check_fit(spec(), LayerRange(0, 15), 150, S)
    with pytest.raises(DoesNotFit, match=r"has 30"):
        check_fit(spec(), LayerRange(0, 31), 5000, S)
