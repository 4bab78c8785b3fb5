"""Claims against what hops deliver."""

from __future__ import annotations

from meshd.routing.overclaim import HOPS, OVERCLAIM, Overclaims
from meshd.vocabulary import LayerRange, NodeId

A = NodeId("a" * 32)
TEN = LayerRange(5, 15)


def told(measured_ms: list[float], *, claimed_ms: float = 1.0, generation: int = 1, tokens: int = 16) -> Overclaims:
    book = Overclaims()
    for ms in measured_ms:
        book.add(A, generation, TEN, compute_ms=ms, claimed_ms=claimed_ms, tokens=tokens)
    return book


def test_a_tenfold_claim_is_found_after_twenty_hops_and_not_before() -> None:
    assert told([100.0] * (HOPS - 1)).ratio(A) is None
    ratio = told([100.0] * HOPS).ratio(A)
    assert ratio == 0.1
    assert ratio < OVERCLAIM


def test_an_honest_slow_node_is_not_marked() -> None:
    assert told([400.0] * HOPS, claimed_ms=40.0).ratio(A) == 1.0


def test_a_few_slow_hops_say_nothing() -> None:
    assert told([10.0] * 12 + [1000.0] * 8).ratio(A) == 1.0


def test_a_new_engine_begins_anew() -> None:
    book = told([100.0] * HOPS)
    book.add(A, 2, TEN, compute_ms=10.0, claimed_ms=1.0, tokens=16)
    assert book.ratio(A) is None


def test_short_answers_and_missing_claims_count_for_nothing() -> None:
    assert told([100.0] * HOPS, tokens=7).ratio(A) is None
    assert told([100.0] * HOPS, claimed_ms=0.0).ratio(A) is None
    assert told([0.0] * HOPS).ratio(A) is None
