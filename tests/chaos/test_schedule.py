"""The schedule of strikes: the same for the same seed, and never more than the room can bear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.cli.chaos.schedule import LASTS_S, OUTAGE, Plan, Strike, strikes
from meshd.vocabulary import LayerRange

THIRDS: Mapping[str, LayerRange | None] = {
    **{f"n{i + 1}": LayerRange(10 * (i % 3), 10 * (i % 3) + 10) for i in range(9)},
    "n10": None,
}
MIXED: Mapping[str, LayerRange | None] = {
    "lane": LayerRange(0, 30),
    "a": LayerRange(0, 20),
    "b": LayerRange(10, 30),
    "c": LayerRange(0, 15),
    "e": None,
}


def away(found: Sequence[Strike], at_s: float, settle_s: float) -> set[str]:
    return {node for one in found for node in one.nodes if one.at_s <= at_s < one.end_s + settle_s}


def covered(places: Mapping[str, LayerRange | None], gone: set[str]) -> set[int]:
    left = [layers for name, layers in places.items() if name not in gone and layers is not None]
    return {layer for layers in left for layer in range(layers.start, layers.end)}


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), places=st.sampled_from([THIRDS, MIXED]), every_s=st.sampled_from([0.5, 2.0]))
def test_a_replica_of_each_layer_is_left(seed: int, places: Mapping[str, LayerRange | None], every_s: float) -> None:
    plan = Plan(120.0, every_s=every_s)
    found = strikes(places, plan, seed)
    assert found == strikes(places, plan, seed)
    for at_s in {one.at_s for one in found}:
        assert covered(places, away(found, at_s, plan.settle_s)) == set(range(30))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_outages_take_one_whole_range_and_nothing_else(seed: int) -> None:
    plan = Plan(240.0, outage_every_s=60.0)
    found = strikes(THIRDS, plan, seed)
    lost = [one for one in found if one.kind == OUTAGE]
    assert len(lost) == 4
    for one in lost:
        assert {THIRDS[name] for name in one.nodes} == {THIRDS[one.nodes[0]]}
        assert len(one.nodes) == 3
    for at_s in {one.at_s for one in found}:
        gone = away(found, at_s, plan.settle_s)
        missing = set(range(30)) - covered(THIRDS, gone)
        out = [one for one in lost if one.at_s <= at_s < one.end_s + plan.settle_s]
        allowed = {layer for one in out if (r := THIRDS[one.nodes[0]]) for layer in range(r.start, r.end)}
        assert missing <= allowed


def test_nobody_is_struck_twice_at_once() -> None:
    found = strikes(THIRDS, Plan(600.0, outage_every_s=60.0), 7)
    for one in found:
        for other in found:
            if one is not other and set(one.nodes) & set(other.nodes):
                assert one.end_s + 6.0 <= other.at_s or other.end_s + 6.0 <= one.at_s


def test_ten_minutes_are_full_of_every_kind() -> None:
    found = strikes(THIRDS, Plan(600.0, outage_every_s=60.0), 1)
    assert {one.kind for one in found} == {*LASTS_S, OUTAGE}
    assert len(found) > 250  # one every two seconds, but for moments at which nobody can be spared
    assert max(one.end_s for one in found) < 600.0 + 8.0


@pytest.mark.parametrize("kinds", [("kill",), ("freeze", "kill")])
def test_only_the_kinds_that_are_asked_for(kinds: tuple[str, ...]) -> None:
    assert {one.kind for one in strikes(THIRDS, Plan(120.0, kinds=kinds), 3)} == set(kinds)


def test_a_room_without_spare_replicas_is_left_alone() -> None:
    lone: Mapping[str, LayerRange | None] = {"a": LayerRange(0, 15), "b": LayerRange(15, 30)}
    assert strikes(lone, Plan(60.0), 1) == ()
