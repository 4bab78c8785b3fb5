"""The planner from outside: choosing, pinning, replacing, refusing."""

from __future__ import annotations

import itertools

import pytest

from meshd.directory import Directory
from meshd.errors import BadRoute, StageUnavailable
from meshd.routing.bandit import BanditPlanner
from meshd.routing.planner import PlannedRoute, Planner
from meshd.vocabulary import Health, LayerRange, NodeStatus, Route
from tests.routing.rooms import DIGEST, change, member, node, room, rows, without

R2 = (member(1, (0, 15)), member(2, (15, 30)))
R3 = (*R2, member(3, (15, 30)))


def planner(seed: int = 1) -> BanditPlanner:
    return BanditPlanner(seed=seed)


def choose(directory: Directory, by: Planner | None = None, now: float = 0.0) -> PlannedRoute:
    return (by or planner()).choose(directory, DIGEST, 30, now=now)


def ids(route: Route | None) -> list[str]:
    assert route is not None
    return [hop.node_id for hop in route]


def test_a_room_nobody_has_measured_takes_the_best_prior() -> None:
    fast = (member(1, (0, 15)), member(2, (15, 30)), member(3, (15, 30), layer_ms=0.5))
    got = choose(room(*fast[:2], fast[2]))
    assert got.mode == "cold"
    assert got.digest == DIGEST
    assert got.signature in {"smollm2-135m|n1[0:15]->n2[15:30]", "smollm2-135m|n1[0:15]->n3[15:30]"}
    assert [hop.generation for hop in got.hops] == [1, 1]


def test_shared_names_are_told_apart_in_signatures() -> None:
    got = choose(room(member(1, (0, 15), name="pi"), member(0xABCD << 112, (15, 30), name="pi")))
    assert got.signature == "smollm2-135m|pi~0000[0:15]->pi~abcd[15:30]"


@pytest.mark.parametrize(
    ("members", "gaps"),
    [
        ((member(1, (0, 15)),), [LayerRange(15, 30)]),
        ((member(1, (3, 10)), member(2, (12, 20))), [LayerRange(0, 3), LayerRange(10, 12), LayerRange(20, 30)]),
        ((), [LayerRange(0, 30)]),
        ((member(1, (0, 15)), member(2, (15, 30), state=NodeStatus.DEAD)), [LayerRange(15, 30)]),
        ((member(1, (0, 15)), member(2, (15, 30), state=NodeStatus.DRAINING)), [LayerRange(15, 30)]),
        ((member(1, (0, 15)), member(2, (15, 30), admitted=False)), [LayerRange(15, 30)]),
    ],
)
def test_missing_layers_are_named_exactly(members: tuple[object, ...], gaps: list[LayerRange]) -> None:
    with pytest.raises(StageUnavailable) as refused:
        choose(room(*members))  # type: ignore[arg-type]  # parametrize erases the type
    assert refused.value.missing == gaps
    assert not refused.value.pending


def test_layers_whose_holders_are_being_probed_are_pending() -> None:
    with pytest.raises(StageUnavailable, match=r"stage 15\.\.30 unavailable: admission is pending") as refused:
        choose(room(R2[0], member(2, (15, 30), admitted=None)))
    assert refused.value.pending
    with pytest.raises(StageUnavailable) as partly:
        choose(room(R2[0], member(2, (15, 20), admitted=None)))
    assert not partly.value.pending


def test_another_digest_is_another_model() -> None:
    with pytest.raises(StageUnavailable):
        planner().choose(room(*R2), "other", 30, now=0.0)


def test_a_pinned_route_is_walked_as_it_stands() -> None:
    directory = room(*R3, member(4, (0, 22)), member(5, (0, 30)))
    got = planner().choose(directory, DIGEST, 30, pinned=(node(4), node(5)), now=0.0)
    assert got.mode == "pinned"
    assert [hop.layers for hop in got.hops] == [LayerRange(0, 22), LayerRange(22, 30)]


@pytest.mark.parametrize(
    ("pinned", "why"),
    [
        ((9,), "no node"),
        ((2,), "lacks layer 0"),
        ((1,), "ends at layer 15 of 30"),
        ((1, 2, 3), "adds nothing"),
        ((1, 1), "adds nothing"),
        ((1, 6), "admission is pending"),
        ((1, 7), "it is dead"),
        ((1, 8), "holds no layers of this model"),
    ],
)
def test_a_pinned_route_that_cannot_be_walked(pinned: tuple[int, ...], why: str) -> None:
    directory = room(
        *R3,
        member(6, (15, 30), admitted=None),
        member(7, (15, 30), state=NodeStatus.DEAD),
        member(8, (15, 30)),
    )
    other = directory.members[node(8)].advert
    directory = change(
        directory, 8, advert=type(other)(node(8), "n8", 1, 1, (), digest="other", layers=LayerRange(15, 30))
    )
    with pytest.raises(BadRoute, match=why):
        planner().choose(directory, DIGEST, 30, pinned=tuple(node(i) for i in pinned), now=0.0)


def test_suspect_and_jammed_replicas_wait_until_nobody_else_is_left() -> None:
    for doubt in ({"state": NodeStatus.SUSPECT}, {"health": Health(jammed=True)}):
        directory = change(room(*R3), 2, **doubt)
        for seed in range(20):
            got = choose(directory, planner(seed))
            assert ids(got.hops) == [node(1), node(3)]
            assert got.mode == "cold"
        alone = choose(without(directory, 3))
        assert alone.mode == "greedy-fallback"
        assert ids(alone.hops) == [node(1), node(2)]


def test_the_fallback_has_the_fewest_doubtful_hops_then_the_fewest_hops() -> None:
    suspect = NodeStatus.SUSPECT
    directory = room(
        member(1, (0, 15), state=suspect), member(2, (15, 30)), member(3, (15, 20)), member(4, (20, 30), state=suspect)
    )
    assert ids(choose(directory).hops) == [node(1), node(2)]


def test_a_jammed_replica_is_asked_before_one_that_may_be_gone() -> None:
    jammed = change(room(*R3), 3, health=Health(jammed=True))
    suspected = change(jammed, 2, state=NodeStatus.SUSPECT)
    lost = planner()
    lost.penalise(node(2), reporter=node(9), now=0.0)  # one reporter: not penalised, but the last to be asked
    for seed in range(20):
        assert ids(choose(suspected, planner(seed)).hops) == [node(1), node(3)]
    both = change(change(room(*R3), 1, health=Health(jammed=True)), 3, health=Health(jammed=True))
    everybody = change(both, 2, health=Health(jammed=True))
    for _ in range(20):
        assert ids(choose(everybody, lost, 1.0).hops) == [node(1), node(3)]


def test_a_pair_is_penalised_for_30_s_and_a_node_once_two_lost_it() -> None:
    directory = room(*R3, member(4, (0, 15)))
    by = planner()
    by.penalise(node(2), reporter=node(1), now=0.0)
    first = {tuple(ids(choose(directory, BanditPlanner(seed=s)).hops)) for s in range(40)}
    assert (node(1), node(2)) in first
    seen = {tuple(hop["node"] for hop in row["hops"]) for row in rows(by, directory, 29.9) if row["expected_share"]}
    assert seen.isdisjoint({(node(1), node(2))})
    by.penalise(node(2), reporter=node(4), now=1.0)
    for _ in range(20):
        assert node(2) not in ids(choose(directory, by, 29.9).hops)
    statuses = {tuple(hop["node"] for hop in row["hops"]): row["prior_tps"] for row in rows(by, directory, 29.9)}
    assert statuses[node(4), node(2)] < statuses[node(4), node(3)]
    again = {tuple(hop["node"] for hop in row["hops"]): row["prior_tps"] for row in rows(by, directory, 31.0)}
    assert again[node(4), node(2)] == again[node(4), node(3)]


def test_if_everything_is_penalised_the_penalty_is_ignored() -> None:
    by = planner()
    for lost in (2, 3):
        for reporter in (1, 9):
            by.penalise(node(lost), reporter=node(reporter), now=0.0)
    got = choose(room(*R3), by, 1.0)
    assert got.mode == "greedy-fallback"
    assert len(got.hops) == 2
    replaced = by.replace(room(*R3), DIGEST, LayerRange(15, 30), avoid={node(2)}, arith="a", now=1.0)
    assert ids(replaced) == [node(3)]


def test_replace_takes_the_same_arithmetic_first_then_any() -> None:
    directory = room(*R3, member(4, (10, 30), arith="b", layer_ms=0.1), member(5, (0, 30), arith="a", layer_ms=9.0))
    by = planner()
    lost = LayerRange(15, 30)
    assert ids(by.replace(directory, DIGEST, lost, avoid={node(2), node(3)}, arith="a", now=0.0)) == [node(5)]
    assert ids(by.replace(directory, DIGEST, lost, avoid={node(2), node(3), node(5)}, arith="a", now=0.0)) == [node(4)]
    assert by.replace(directory, DIGEST, lost, avoid={node(i) for i in (2, 3, 4, 5)}, arith="a", now=0.0) is None


def test_replace_covers_exactly_the_range_by_several_hops_where_it_must() -> None:
    directory = room(member(1, (0, 20)), member(2, (15, 22)), member(3, (20, 30)), member(4, (0, 30)))
    got = planner().replace(directory, DIGEST, LayerRange(16, 28), avoid={node(4)}, arith="a", now=0.0)
    assert got is not None
    assert got[0].layers.start == 16
    assert got[-1].layers.end == 28
    assert all(a.layers.end == b.layers.start for a, b in itertools.pairwise(got))
    assert node(4) not in ids(got)


def test_replace_asks_a_lost_node_last() -> None:
    by = planner()
    by.penalise(node(2), reporter=node(1), now=0.0)
    for _ in range(10):
        assert ids(by.replace(room(*R3), DIGEST, LayerRange(15, 30), avoid=(), arith="a", now=1.0)) == [node(3)]
    assert ids(by.replace(room(*R2), DIGEST, LayerRange(15, 30), avoid=(), arith="a", now=1.0)) == [node(2)]
