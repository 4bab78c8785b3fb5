"""Why a node hands its work over: an order, or a battery that runs out."""

from __future__ import annotations

import pytest

from meshd.node.draining import Draining
from meshd.vocabulary import Health


def told(draining: Draining, *samples: tuple[int | None, bool | None]) -> list[str]:
    reasons = []
    for charge, mains in samples:
        draining.sample(Health(battery_pct=charge, on_ac=mains))
        reasons.append(draining.reason)
    return reasons


def test_a_battery_that_runs_out_and_is_charged_again() -> None:
    low = "battery at 13 %, not on mains"
    draining = Draining(15)
    assert told(draining, (16, False), (14, False), (13, False)) == ["", "", low]
    assert told(draining, (16, False), (19, False)) == [low, low]  # not far enough above
    assert told(draining, (20, False), (20, False)) == [low, ""]
    assert told(draining, (13, False), (13, False), (13, True), (13, True)) == ["", low, low, ""]


def test_one_odd_sample_is_nothing() -> None:
    assert told(Draining(15), (3, False), (80, False), (3, False), (80, True)) == [""] * 4


@pytest.mark.parametrize("charge", [(None, None), (3, None), (None, False), (3, True)])
def test_who_knows_nothing_does_not_drain(charge: tuple[int | None, bool | None]) -> None:
    assert told(Draining(15), *[charge] * 5) == [""] * 5


def test_never_for_the_battery() -> None:
    assert told(Draining(0), *[(0, False)] * 5) == [""] * 5


def test_orders_and_the_battery_do_not_undo_each_other() -> None:
    draining = Draining(15)
    draining.order()
    assert told(draining, (3, False), (3, False), (80, True), (80, True)) == ["told to"] * 4
    draining.resume()
    assert draining.reason == ""
    told(draining, (3, False), (3, False))
    draining.resume()  # whoever says so knows the battery
    assert told(draining, (3, False), (3, False)) == ["", ""]
    assert told(draining, (80, True), (80, True), (3, False), (3, False))[-1].startswith("battery")


def test_it_says_when_the_reason_changed() -> None:
    draining = Draining(15)
    low = Health(battery_pct=3, on_ac=False)
    assert [draining.sample(low) for _ in range(3)] == [False, True, False]
