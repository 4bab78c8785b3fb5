"""What is said of an answer: right, an honest 503, or a fault."""

from __future__ import annotations

from typing import Any

import pytest

from meshd.cli.chaos import verdict
from meshd.cli.chaos.schedule import OUTAGE, Strike
from meshd.cli.chaos.verdict import Asked, Outage, judge, noticed_s, stalls
from meshd.vocabulary import LayerRange

EXPECTED = (1, 2, 3, 4)
OUT = [Outage(LayerRange(10, 20), 50.0, 60.0)]


def asked(**more: Any) -> Asked:
    plain: dict[str, Any] = {
        "began_s": 51.0,
        "ended_s": 52.0,
        "prompt": 0,
        "tokens": EXPECTED,
        "times": ((51.1, 1), (51.2, 1), (51.3, 2)),
        "nodes": frozenset({"n1", "n2"}),
    }
    return Asked(**{**plain, **more})


def unavailable(*gap: int, **more: Any) -> Asked:
    return asked(tokens=(), times=(), code="stage_unavailable", missing=(LayerRange(*gap),), **more)


@pytest.mark.parametrize(
    ("one", "outcome"),
    [
        (asked(), verdict.RIGHT),
        (asked(ended_s=120.0), verdict.LATE),
        (asked(tokens=(1, 2, 9, 4)), verdict.WRONG),
        (asked(tokens=(1, 2, 3)), verdict.WRONG),
        (asked(tokens=(1, 2, 3, 4, 5)), verdict.WRONG),
        (asked(tokens=(1, 2), code="no_entry"), verdict.LOST),
        (asked(tokens=(1, 9), code="no_entry"), verdict.WRONG),
        (unavailable(10, 20), verdict.HONEST),
        (unavailable(0, 30), verdict.HONEST),
        (unavailable(20, 30), verdict.FALSE_503),
        (unavailable(10, 20, ended_s=49.0), verdict.FALSE_503),
        (unavailable(10, 20, ended_s=61.0), verdict.FALSE_503),
    ],
)
def test_judged(one: Asked, outcome: str) -> None:
    assert judge(one, EXPECTED, OUT, deadline_s=60.0) == outcome


def test_an_honest_503_is_timed_from_when_it_could_be_known() -> None:
    assert noticed_s(unavailable(10, 20, waited_s=2.0, ended_s=50.4), OUT) == pytest.approx(0.4)
    assert noticed_s(unavailable(10, 20, waited_s=0.2, ended_s=55.0), OUT) == pytest.approx(0.2)


def test_a_stall_is_put_down_to_a_strike_on_its_way() -> None:
    times = tuple((51.0 + 0.1 * i, 1) for i in range(5)) + tuple((52.0 + 0.1 * i, 1) for i in range(5))
    strikes = [
        Strike(51.4, "kill", ("n2",), 3.0),
        Strike(51.4, "freeze", ("n7",), 3.0),
        Strike(20.0, "freeze", ("n1",), 3.0),
    ]
    (stall,) = stalls(asked(times=times), strikes)
    assert stall.kind == "reset"
    assert stall.length_s == pytest.approx(0.5)
    (unknown,) = stalls(asked(times=times), strikes[1:])
    assert unknown.kind == ""


def test_an_outage_takes_what_its_nodes_held() -> None:
    places = {"n1": LayerRange(0, 10), "n2": LayerRange(10, 20), "n3": LayerRange(10, 25), "e0": None}
    assert verdict.lost_layers(Strike(5.0, OUTAGE, ("n2", "n3", "e0"), 4.0), places) == LayerRange(10, 25)


def test_throughput_counts_tokens_by_second() -> None:
    assert verdict.tokens_per_s([asked(), asked()], 51.0, 52.0) == 8.0
    assert verdict.each_second([asked()], 53.0)[50:] == [0, 4, 0, 0]


@pytest.mark.parametrize(
    ("outage", "kind"),
    [
        (Outage(LayerRange(10, 20), 51.3, 52.5), OUTAGE),
        (Outage(LayerRange(10, 20), 51.9, 55.0), OUTAGE),
        (Outage(LayerRange(10, 20), 51.3, 51.9), "reset"),
        (Outage(LayerRange(10, 20), 52.1, 55.0), "reset"),
    ],
)
def test_a_stall_that_ends_in_an_outage_or_with_it_is_the_outages(outage: Outage, kind: str) -> None:
    """One that goes on when the layers are back is not."""
    times = ((51.2, 1), (51.3, 1), (51.4, 1), (52.0, 1), (52.1, 1))
    (stall,) = stalls(asked(times=times), [Strike(51.4, "kill", ("n2",), 3.0)], [outage])
    assert stall.kind == kind
