"""Arms: decay, epochs, samples, dumps."""

from __future__ import annotations

import json
import math

import pytest

from meshd.routing.stats import IDLE_S, MAX_ARMS, ArmStats, Topology


def stats() -> ArmStats:
    return ArmStats(half_life_s=600.0, min_sample_tokens=8)


def test_mass_halves_in_a_half_life_and_the_arm_decays() -> None:
    book = stats()
    for _ in range(3):
        book.record("a", tokens=10, seconds=1.0, epoch=0, now=0.0)
    assert book.view("a", epoch=0, now=0.0).mass == pytest.approx(3.0)
    assert book.view("a", epoch=0, now=600.0).mass == pytest.approx(1.5)
    assert book.view("a", epoch=0, now=1200.0).status == "proven"
    decayed = book.view("a", epoch=0, now=1800.0)
    assert (decayed.status, decayed.tps, decayed.samples) == ("decayed", 10.0, 3)


def test_seven_tokens_change_nothing_eight_add_a_sample() -> None:
    book = stats()
    book.record("a", tokens=7, seconds=0.1, epoch=0, now=0.0)
    assert book.view("a", epoch=0, now=0.0).status == "unsampled"
    assert book.dump(0.0) == {}
    book.record("a", tokens=8, seconds=0.1, epoch=0, now=0.0)
    assert book.view("a", epoch=0, now=0.0).samples == 1
    before = book.dump(1.0)
    book.record("a", tokens=7, seconds=9.0, epoch=0, now=1.0)
    assert book.dump(1.0) == before


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_no_sample(seconds: float) -> None:
    book = stats()
    book.record("a", tokens=100, seconds=seconds, epoch=0, now=0.0)
    assert book.view("a", epoch=0, now=0.0).tps is None


def test_another_epoch_makes_an_arm_stale_with_its_speed_kept_until_it_is_measured_again() -> None:
    book = stats()
    for _ in range(9):
        book.record("a", tokens=20, seconds=1.0, epoch=0, now=0.0)
    stale = book.view("a", epoch=1, now=0.0)
    assert (stale.status, stale.tps, stale.samples) == ("stale", 20.0, 9)
    book.record("a", tokens=10, seconds=1.0, epoch=1, now=0.0)
    again = book.view("a", epoch=1, now=0.0)
    assert again.status == "proven"
    assert again.tps == pytest.approx(15.0), "nine old samples weigh as much as one new"


def test_a_change_of_speed_is_followed_within_a_dozen_samples() -> None:
    book = stats()
    for _ in range(200):
        book.record("a", tokens=30, seconds=1.0, epoch=0, now=0.0)
    for _ in range(12):
        book.record("a", tokens=10, seconds=1.0, epoch=0, now=0.0)
    tps = book.view("a", epoch=0, now=0.0).tps
    assert tps is not None
    assert tps == pytest.approx(10.0, rel=0.1)


def test_failures_count_against_the_arm_and_fade() -> None:
    book = stats()
    book.fail("a", 0.0)
    assert book.view("a", epoch=0, now=0.0).success == pytest.approx(0.5)
    assert book.view("a", epoch=0, now=0.0).status == "unsampled"
    for _ in range(9):
        book.record("a", tokens=8, seconds=1.0, epoch=0, now=0.0)
    assert book.view("a", epoch=0, now=0.0).success == pytest.approx(10 / 11)
    assert book.view("a", epoch=0, now=60_000.0).success == pytest.approx(1.0)


def test_arms_are_dropped_after_a_day_and_bounded() -> None:
    book = stats()
    book.record("old", tokens=8, seconds=1.0, epoch=0, now=0.0)
    book.record("new", tokens=8, seconds=1.0, epoch=0, now=IDLE_S - 1)
    assert set(book.dump(IDLE_S - 1)) == {"old", "new"}
    assert set(book.dump(IDLE_S)) == {"new"}
    for i in range(MAX_ARMS + 50):
        book.record(f"arm{i}", tokens=8, seconds=1.0, epoch=0, now=IDLE_S + i)
    assert len(book.dump(IDLE_S + MAX_ARMS + 50)) <= MAX_ARMS
    assert book.view(f"arm{MAX_ARMS + 49}", epoch=0, now=IDLE_S).samples == 1


def test_what_was_loaded_is_stale_and_survives_json_and_another_clock() -> None:
    book = stats()
    for _ in range(4):
        book.record("a", tokens=20, seconds=1.0, epoch=0, now=5000.0)
    book.fail("b", 5000.0)
    saved = json.loads(json.dumps(book.dump(5600.0)))
    again = stats()
    again.load(saved, now=3.0)
    view = again.view("a", epoch=0, now=3.0)
    assert (view.status, view.tps, view.samples) == ("stale", 20.0, 4)
    assert view.mass == pytest.approx(2.0)
    assert again.view("b", epoch=0, now=3.0).success < 1.0


@pytest.mark.parametrize(
    "damage",
    [
        None,
        [],
        "x",
        {"a": 1},
        {1: {}},
        {"a": {"age_s": "x", "tps": 1.0, "mass": 1.0, "failures": 0.0, "samples": 1}},
        {"a": {"age_s": 1, "tps": -1.0, "mass": 1.0, "failures": 0.0, "samples": 1}},
        {"a": {"age_s": 1, "tps": 1.0, "mass": float("nan"), "failures": 0.0, "samples": 1}},
        {"a": {"age_s": 1, "tps": 1.0, "mass": 1.0, "failures": 0.0, "samples": "many"}},
        {"a": {"age_s": 1, "tps": 1.0, "mass": 1.0, "failures": True, "samples": 1}},
    ],
)
def test_a_damaged_dump_is_left_out(damage: object) -> None:
    book = stats()
    book.load(damage, now=0.0)
    assert book.dump(0.0) == {}


def test_the_epoch_moves_with_the_room_only() -> None:
    topology = Topology()
    assert topology.observe(["a", "b"]) == 0
    assert topology.observe(["b", "a"]) == 0
    assert topology.observe(["b"]) == 1
    assert topology.observe(["a", "b"]) == 2
