"""Claims against what hops deliver."""

from __future__ import annotations

import pytest

from meshd.directory import Member
from meshd.election.elect import elect
from meshd.election.settings import Settings
from meshd.routing.overclaim import HOPS, OVERCLAIM, Overclaims, as_delivered
from meshd.vocabulary import LayerRange, NodeId
from tests.election.specs import advert, hash_spec
from tests.routing.rooms import member

A = NodeId("a" * 32)
TEN = LayerRange(5, 15)
RUN = (7, 1)


def told(measured_ms: list[float], *, claimed_ms: float = 1.0, tokens: int = 16) -> Overclaims:
    book = Overclaims()
    for ms in measured_ms:
        book.add(A, RUN, TEN, compute_ms=ms, claimed_ms=claimed_ms, tokens=tokens)
    return book


def test_a_tenfold_claim_is_found_after_twenty_hops_and_not_before() -> None:
    assert told([100.0] * (HOPS - 1)).ratio(A, RUN) is None
    ratio = told([100.0] * HOPS).ratio(A, RUN)
    assert ratio == 0.1
    assert ratio < OVERCLAIM


def test_an_honest_slow_node_is_not_marked() -> None:
    assert told([400.0] * HOPS, claimed_ms=40.0).ratio(A, RUN) == 1.0


def test_a_few_slow_hops_say_nothing() -> None:
    assert told([10.0] * 12 + [1000.0] * 8).ratio(A, RUN) == 1.0


def test_a_new_engine_begins_anew_also_in_a_new_run() -> None:
    for run in ((7, 2), (8, 1)):
        book = told([100.0] * HOPS)
        assert book.ratio(A, run) is None
        book.add(A, run, TEN, compute_ms=10.0, claimed_ms=1.0, tokens=16)
        assert book.ratio(A, run) is None
        assert book.ratio(A, RUN) is None


def test_short_answers_and_missing_claims_count_for_nothing() -> None:
    assert told([100.0] * HOPS, tokens=7).ratio(A, RUN) is None
    assert told([100.0] * HOPS, claimed_ms=0.0).ratio(A, RUN) is None
    assert told([0.0] * HOPS).ratio(A, RUN) is None


def test_the_election_counts_an_overclaimer_with_what_it_delivers() -> None:
    honest, boaster = (
        member(1, (0, 10), layer_ms=2.0, claim_ratio=0.8),
        member(2, (0, 10), layer_ms=0.2, claim_ratio=0.1),
    )
    assert as_delivered(honest) == honest.advert
    assert as_delivered(boaster).capability.layer_ms_1 == pytest.approx(2.0)
    assert as_delivered(boaster).layers == boaster.advert.layers


def test_an_overclaimer_gets_no_wider_range_than_its_measured_speed_earns() -> None:
    """Ten times the speed claimed, and taken away again: the boaster's range is that of a device that claims the truth."""
    sizes = hash_spec(30, 10)
    honest = advert(1, 360, layer_ms=2.0)

    def range_of(layer_ms: float, claim_ratio: float | None = None) -> LayerRange | None:
        boaster = Member(advert(2, 360, layer_ms=layer_ms), claim_ratio=claim_ratio)
        return elect(
            sizes, [honest, as_delivered(boaster)], boaster.node_id, Settings(target_replicas=1, lane_fraction=0.0)
        )

    assert range_of(2.0) == range_of(0.2, claim_ratio=0.1)
    assert range_of(2.0) != range_of(0.2)
