"""The search for routes, against a search that is too slow to be wrong."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from meshd.routing.candidates import ENUMERATED, SPREAD, Holder, cover, missing, routes
from meshd.vocabulary import Hop, LayerRange, Route
from tests.routing.rooms import node


def every_route(holders: list[Holder], num_layers: int, start: int = 0) -> set[tuple[tuple[str, int, int], ...]]:
    """All chains of holders by plain recursion."""
    if start >= num_layers:
        return {()}
    found = set()
    for holder in holders:
        if start in holder.layers:
            end = min(holder.layers.end, num_layers)
            found |= {((holder.node_id, start, end), *rest) for rest in every_route(holders, num_layers, end)}
    return found


def flat(route: Route) -> tuple[tuple[str, int, int], ...]:
    return tuple((hop.node_id, hop.layers.start, hop.layers.end) for hop in route)


def random_holders(rng: Random, num_layers: int) -> list[Holder]:
    cuts = sorted({0, num_layers, *(rng.randrange(1, num_layers) for _ in range(rng.randrange(3)))})
    holders = []
    for i in range(rng.randrange(1, 8)):
        first, last = (
            sorted(rng.sample(cuts, 2)) if rng.random() < 0.7 else sorted(rng.sample(range(num_layers + 4), 2))
        )
        holders.append(Holder(node(i), LayerRange(first, last), layer_ms=rng.uniform(0.5, 5.0)))
    return holders


def test_a_thousand_random_rooms() -> None:
    rng = Random(7)
    with_routes = 0
    for _ in range(1000):
        num_layers = rng.randrange(4, 40)
        holders = random_holders(rng, num_layers)
        found = routes(holders, num_layers, rng)
        truth = every_route(holders, num_layers)
        with_routes += bool(truth)
        assert bool(found) == bool(truth)
        assert len({flat(route) for route in found}) == len(found)
        for route in found:
            assert flat(route) in truth
            assert route[0].layers.start == 0
            assert route[-1].layers.end == num_layers
            assert all(a.layers.end == b.layers.start for a, b in pairwise(route))
            assert len({hop.node_id for hop in route}) == len(route)
        if len(truth) <= ENUMERATED:
            assert {flat(route) for route in found} == truth
    assert with_routes > 300


def test_a_node_serves_the_inside_of_what_it_holds() -> None:
    holders = [
        Holder(node(1), LayerRange(0, 22)),
        Holder(node(2), LayerRange(0, 40)),
        Holder(node(3), LayerRange(22, 40)),
    ]
    found = {flat(route) for route in routes(holders, 40, Random(1))}
    assert found == {
        ((node(1), 0, 22), (node(2), 22, 40)),
        ((node(1), 0, 22), (node(3), 22, 40)),
        ((node(2), 0, 40),),
    }


@pytest.mark.parametrize("shape", ["replicas", "chaos"])
def test_two_hundred_members_are_searched_within_bounds(shape: str) -> None:
    rng = Random(3)
    holders = [
        Holder(node(i), LayerRange(15 * (i % 2), 15 * (i % 2) + 15) if shape == "replicas" else _somewhere(rng))
        for i in range(200)
    ]
    found = routes(holders, 30, rng)
    assert 8 <= len(found) <= max(ENUMERATED, SPREAD)
    if shape == "replicas":
        assert len({route[0].node_id for route in found[:8]}) == 8


def _somewhere(rng: Random) -> LayerRange:
    start = rng.randrange(0, 28)
    return LayerRange(start, rng.randrange(start + 1, 31))


def test_equals_are_taken_in_another_order_by_another_entry() -> None:
    holders = [Holder(node(i), LayerRange(0, 30)) for i in range(5)]
    firsts = {routes(holders, 30, Random(seed))[0][0].node_id for seed in range(60)}
    assert firsts == {node(i) for i in range(5)}


def test_the_first_routes_use_different_nodes() -> None:
    holders = [Holder(node(i), LayerRange(15 * (i % 2), 15 * (i % 2) + 15)) for i in range(8)]
    first_four = routes(holders, 30, Random(1))[:4]
    assert len({hop.node_id for route in first_four for hop in route}) == 8


def one_a_hop(_holder: Holder, _hop: Hop) -> tuple[float, ...]:
    return (1.0,)


def test_cover_never_gaps_and_never_leaves_the_range() -> None:
    rng = Random(11)
    covered = 0
    for _ in range(500):
        num_layers = rng.randrange(4, 40)
        holders = random_holders(rng, num_layers)
        start = rng.randrange(0, num_layers - 1)
        wanted = LayerRange(start, rng.randrange(start + 1, num_layers + 1))
        found = cover(holders, wanted, rng, one_a_hop)
        gaps = missing((holder.layers for holder in holders), wanted)
        assert (found is None) == bool(gaps)
        if found is not None:
            covered += 1
            assert [layer for hop in found for layer in range(hop.layers.start, hop.layers.end)] == list(
                range(wanted.start, wanted.end)
            )
            assert len(found) == min(len(way) for way in _inside(holders, wanted))
    assert covered > 100


def _inside(holders: list[Holder], wanted: LayerRange) -> set[tuple[tuple[str, int, int], ...]]:
    return every_route(holders, wanted.end, wanted.start)


def test_cover_takes_the_cheapest_sum() -> None:
    holders = [
        Holder(node(1), LayerRange(0, 10), layer_ms=9),
        Holder(node(2), LayerRange(0, 4)),
        Holder(node(3), LayerRange(4, 10)),
    ]

    def slow(holder: Holder, hop: Hop) -> tuple[float, ...]:
        return (holder.layer_ms * len(hop.layers),)

    found = cover(holders, LayerRange(0, 10), Random(1), slow)
    assert found is not None
    assert [hop.node_id for hop in found] == [node(2), node(3)]


def test_missing_is_the_exact_complement() -> None:
    rng = Random(5)
    for _ in range(500):
        held = [LayerRange(s, s + rng.randrange(1, 9)) for s in (rng.randrange(0, 30) for _ in range(rng.randrange(6)))]
        gaps = missing(held, LayerRange(4, 30))
        gone = {layer for gap in gaps for layer in range(gap.start, gap.end)}
        assert gone == {layer for layer in range(4, 30) if not any(layer in h for h in held)}
        assert all(a.end < b.start for a, b in pairwise(gaps))
