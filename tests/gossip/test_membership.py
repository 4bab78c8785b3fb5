"""Beliefs are a lattice: order, repetition and grouping of evidence never matter."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from meshd.gossip.membership import MAX_ACCUSERS, Belief, Rank, from_accusation, merge
from meshd.gossip.wire import Accusation
from tests.gossip.world import ADVERT, OTHER, beliefs, node, stated


@given(beliefs(), beliefs())
def test_merge_is_commutative(a: Belief, b: Belief) -> None:
    assert merge(a, b) == merge(b, a)


@given(beliefs(), beliefs(), beliefs())
def test_merge_is_associative(a: Belief, b: Belief, c: Belief) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@given(st.lists(beliefs(), min_size=1, max_size=8), st.randoms())
def test_any_order_with_any_repetition_gives_the_same(evidence: list[Belief], rng: object) -> None:
    shuffled = [*evidence, *evidence[:3]]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis types its random as object
    assert reduce(merge, shuffled) == reduce(merge, evidence)


@given(beliefs(), beliefs())
def test_merge_is_monotone(a: Belief, b: Belief) -> None:
    merged = merge(a, b)
    assert merged.standing == max(a.standing, b.standing)
    assert merge(merged, a) == merge(merged, b) == merged


def test_only_a_higher_incarnation_lifts_an_accusation() -> None:
    said, _ = stated(ADVERT)
    alive = Belief(said.epoch, said.incarnation, Rank.ALIVE, statement=said)
    dead = merge(alive, Belief(said.epoch, said.incarnation, Rank.DEAD, (node(5),)))
    assert merge(dead, alive).rank is Rank.DEAD
    assert merge(dead, Belief(said.epoch, said.incarnation + 1, Rank.ALIVE)).rank is Rank.ALIVE
    assert merge(dead, Belief(said.epoch + 1, 0, Rank.ALIVE)).rank is Rank.ALIVE


def test_accusers_are_bounded() -> None:
    crowd = [from_accusation(Accusation(OTHER, 1, 1, node(i))) for i in range(40)]
    merged = reduce(merge, crowd)
    assert len(merged.accusers) == MAX_ACCUSERS
    assert reduce(merge, reversed(crowd)) == merged
