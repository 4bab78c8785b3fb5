"""How the planner divides requests: shares, scouting, epochs, priors, load."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest

from meshd.directory import Directory
from meshd.routing.bandit import BanditPlanner
from meshd.routing.planner import PlannedRoute
from meshd.vocabulary import Health, LayerRange, NodeId, NodeStatus
from tests.routing.rooms import DIGEST, NAMES, change, lanes, member, node, room, rows, without


def choose(by: BanditPlanner, directory: Directory, now: float = 0.0) -> PlannedRoute:
    return by.choose(directory, DIGEST, 30, now=now)


def feed(by: BanditPlanner, directory: Directory, number: int, tps: float, *, tokens: int = 100) -> None:
    """One answer over the lane of that node."""
    now = 0.0
    route = by.choose(directory, DIGEST, 30, pinned=(node(number),), now=now)
    by.begin(route, now)
    by.finish(route, route.hops, tokens=tokens, seconds=tokens / tps, failed=False, now=now)


def test_two_proven_arms_are_drawn_by_their_speeds() -> None:
    by, directory = BanditPlanner(seed=1), lanes(2)
    for number, tps in ((1, 30.0), (2, 20.0)):
        feed(by, directory, number, tps)
    drawn = Counter(choose(by, directory).hops[0].node_id for _ in range(4000))
    assert drawn[node(1)] / 4000 == pytest.approx(0.6, abs=0.03)
    by_signature = {row["signature"]: row for row in rows(by, directory, 0.0)}
    assert by_signature["smollm2-135m|n1[0:30]"]["expected_share"] == pytest.approx(0.6)
    assert by_signature["smollm2-135m|n2[0:30]"]["coefficient"] == pytest.approx(2 / 3)


def test_alpha_sharpens() -> None:
    by, directory = BanditPlanner(seed=1, weight_alpha=3.0), lanes(2)
    for number, tps in ((1, 20.0), (2, 10.0)):
        feed(by, directory, number, tps)
    assert max(row["expected_share"] for row in rows(by, directory, 0.0)) == pytest.approx(8 / 9)


def test_the_scout_share_goes_to_the_least_measured() -> None:
    by, directory = BanditPlanner(seed=2), lanes(3, [1.0, 2.0, 1.0])
    feed(by, directory, 1, 30.0)
    modes: Counter[tuple[str, NodeId]] = Counter()
    for _ in range(4000):
        got = choose(by, directory)
        modes[got.mode, got.hops[0].node_id] += 1
    assert modes["scout", node(3)] / 4000 == pytest.approx(0.3, abs=0.03)
    assert modes["exploit", node(1)] == 4000 - modes["scout", node(3)]
    shares = {row["signature"]: row["expected_share"] for row in rows(by, directory, 0.0)}
    assert shares["smollm2-135m|n3[0:30]"] == pytest.approx(0.3)
    assert shares["smollm2-135m|n2[0:30]"] == 0.0
    feed(by, directory, 3, 30.0)
    feed(by, directory, 2, 30.0)
    assert {choose(by, directory).mode for _ in range(200)} == {"exploit"}


def test_an_epoch_change_makes_what_was_proven_stale_with_its_speed_kept() -> None:
    by, directory = BanditPlanner(seed=3), lanes(3)
    feed(by, directory, 1, 30.0)
    feed(by, directory, 2, 10.0)
    before = by.table(directory, NAMES)["models"]["smollm2-135m"]["epoch"]
    for quiet in (
        change(directory, 3, state=NodeStatus.SUSPECT),
        change(directory, 3, health=Health(jammed=True, queue_depth=9)),
        directory,
    ):
        assert by.table(quiet, NAMES)["models"]["smollm2-135m"]["epoch"] == before
    smaller = without(directory, 3)
    table = {row["signature"]: row for row in rows(by, smaller, 0.0)}
    assert by.table(smaller, NAMES)["models"]["smollm2-135m"]["epoch"] == before + 1
    assert table["smollm2-135m|n1[0:30]"]["status"] == "stale"
    assert table["smollm2-135m|n1[0:30]"]["tps"] == pytest.approx(30.0)
    drawn = Counter((choose(by, smaller).mode, choose(by, smaller).hops[0].node_id) for _ in range(100))
    assert {mode for mode, _ in drawn} == {"exploit", "scout"}
    feed(by, smaller, 1, 30.0)
    assert {row["signature"]: row["status"] for row in rows(by, smaller, 0.0)} == {
        "smollm2-135m|n1[0:30]": "proven",
        "smollm2-135m|n2[0:30]": "stale",
    }


def test_stale_arms_are_used_by_speed_while_nothing_is_proven() -> None:
    by, directory = BanditPlanner(seed=4, explore_share=0.0), lanes(2)
    feed(by, directory, 1, 30.0)
    feed(by, directory, 2, 10.0)
    saved = json.loads(json.dumps(by.dump(10.0)))
    again = BanditPlanner(seed=4, explore_share=0.0)
    again.load(saved, 0.0)
    assert {row["status"] for row in rows(again, directory, 0.0)} == {"stale"}
    assert [row["expected_share"] for row in rows(again, directory, 0.0)].count(pytest.approx(0.75)) == 1
    assert choose(again, directory).mode == "exploit"


def test_a_short_answer_is_no_sample() -> None:
    by, directory = BanditPlanner(seed=5), lanes(1)
    feed(by, directory, 1, 30.0, tokens=7)
    assert rows(by, directory, 0.0)[0]["samples"] == 0
    feed(by, directory, 1, 30.0, tokens=8)
    assert rows(by, directory, 0.0)[0]["samples"] == 1


def test_the_prior_of_a_hybrid_is_that_of_its_slowest_hop() -> None:
    def prior(second_ms: float) -> float:
        directory = room(member(1, (0, 22), total=40), member(2, (0, 40), total=40, layer_ms=second_ms))
        table = {row["signature"]: row["prior_tps"] for row in rows(BanditPlanner(seed=1), directory, 0.0)}
        value = table["smollm2-135m|n1[0:22]->n2[22:40]"]
        assert isinstance(value, float)
        return value

    assert prior(2.0) == pytest.approx(1000 / (2.0 * 18))
    assert prior(4.0) == pytest.approx(prior(2.0) / 2)
    assert prior(0.1) == pytest.approx(1000 / 22), "now the first hop is the slowest"


@pytest.mark.parametrize("layer_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_unknown_speeds_have_a_prior(layer_ms: float) -> None:
    prior = rows(BanditPlanner(seed=1), lanes(1, [layer_ms]), 0.0)[0]["prior_tps"]
    assert prior == pytest.approx(1000 / (5.0 * 30))


def test_what_is_queued_and_what_was_overclaimed_lowers_the_prior() -> None:
    directory = room(
        member(1, (0, 30)),
        member(2, (0, 30), health=Health(queue_depth=1, in_flight=2)),
        member(3, (0, 30), claim_ratio=0.25),
    )
    priors = {row["hops"][0]["name"]: row["prior_tps"] for row in rows(BanditPlanner(seed=1), directory, 0.0)}
    assert priors["n2"] == pytest.approx(priors["n1"] / 4)
    assert priors["n3"] == pytest.approx(priors["n1"] / 4)
    assert {choose(BanditPlanner(seed=s), directory).hops[0].node_id for s in range(20)} == {node(1)}


def test_a_failure_counts_against_the_route_that_was_planned() -> None:
    by, directory = BanditPlanner(seed=6), room(member(1, (0, 15)), member(2, (15, 30)), member(3, (15, 30)))
    planned = by.choose(directory, DIGEST, 30, pinned=(node(1), node(2)), now=0.0)
    ran = by.choose(directory, DIGEST, 30, pinned=(node(1), node(3)), now=0.0)
    by.begin(planned, 0.0)
    by.finish(planned, ran.hops, tokens=50, seconds=1.0, failed=False, now=0.0)
    table = {row["signature"]: row for row in rows(by, directory, 0.0)}
    failed, good = table["smollm2-135m|n1[0:15]->n2[15:30]"], table["smollm2-135m|n1[0:15]->n3[15:30]"]
    assert (failed["samples"], good["samples"], good["tps"]) == (0, 1, 50.0)
    assert failed["prior_tps"] == pytest.approx(good["prior_tps"] / 2)
    by.begin(ran, 0.0)
    by.finish(ran, (), tokens=0, seconds=0.0, failed=True, now=0.0)
    after = {row["signature"]: row for row in rows(by, directory, 0.0)}
    assert after["smollm2-135m|n1[0:15]->n3[15:30]"]["prior_tps"] < good["prior_tps"]


def test_the_share_column_sums_to_one_whatever_happens() -> None:
    rng = Random(9)
    by = BanditPlanner(seed=9)
    directory = room(*(member(i, (0, 15) if i % 2 else (15, 30), layer_ms=rng.uniform(1, 5)) for i in range(1, 8)))
    open_routes: list[PlannedRoute] = []
    for step in range(300):
        now = step * 20.0
        number = rng.randrange(1, 8)
        state = rng.choice([NodeStatus.ALIVE, NodeStatus.ALIVE, NodeStatus.SUSPECT])
        directory = change(directory, number, state=state, health=Health(jammed=rng.random() < 0.1))
        if rng.random() < 0.1:
            by.penalise(node(number), reporter=node(rng.randrange(1, 8)), now=now)
        route = choose(by, directory, now)
        by.begin(route, now)
        open_routes.append(route)
        if len(open_routes) > 4:
            done = open_routes.pop(0)
            failed = rng.random() < 0.1
            by.finish(done, done.hops, tokens=50, seconds=rng.uniform(1, 9), failed=failed, now=now)
        table = rows(by, directory, now)
        assert 1 <= len(table) <= 8
        assert sum(row["expected_share"] for row in table) == pytest.approx(1.0)
        priors = [row["prior_tps"] for row in table]
        assert priors == sorted(priors, reverse=True)
        assert {row["status"] for row in table} <= {"proven", "unsampled", "stale", "decayed"}
        json.dumps(table, allow_nan=False)


def test_the_table_of_a_room_with_gaps_or_nobody_is_empty() -> None:
    by = BanditPlanner(seed=1)
    table = by.table(room(member(1, (0, 15))), {DIGEST: "smollm2-135m", "other": "m"}, now=0.0)
    assert table["config"] == {"explore_share": 0.3, "weight_alpha": 1.0, "half_life_s": 600.0, "min_sample_tokens": 8}
    assert table["models"] == {
        "smollm2-135m": {"epoch": 0, "candidates": []},
        "m": {"epoch": 0, "candidates": []},
    }


def test_reading_the_table_does_not_change_what_is_drawn() -> None:
    def drawn(read: bool) -> list[str]:
        by, directory = BanditPlanner(seed=12), lanes(4)
        for number in (1, 2):
            feed(by, directory, number, 10.0 * number)
        seen = []
        for _ in range(50):
            if read:
                rows(by, directory, 0.0)
            seen.append(choose(by, directory).signature)
        return seen

    assert drawn(read=True) == drawn(read=False)


def test_an_idle_lane_nobody_measured_is_scouted_when_the_measured_are_busy() -> None:
    by, directory = BanditPlanner(seed=1), lanes(2)
    feed(by, directory, 1, 30.0)
    by.begin(by.choose(directory, DIGEST, 30, pinned=(node(1),), now=0.0), 0.0)
    for _ in range(20):
        got = choose(by, directory)
        assert (got.mode, got.hops[0].node_id) == ("scout", node(2))


def test_in_flight_requests_of_ones_own_are_not_counted_twice() -> None:
    by = BanditPlanner(seed=1)
    directory = lanes(1)
    by.begin(choose(by, directory), 0.0)
    busy = change(directory, 1, health=Health(in_flight=1))
    assert rows(by, busy, 0.0)[0]["prior_tps"] == rows(BanditPlanner(seed=1), directory, 0.0)[0]["prior_tps"]


def test_a_hundred_lanes_are_all_used_under_load() -> None:
    by, directory = BanditPlanner(seed=1), lanes(100)
    used = set()
    for _ in range(100):
        route = choose(by, directory)
        by.begin(route, 0.0)
        used.add(route.hops[0].node_id)
    assert len(used) >= 20


class Lanes:
    """Lanes that each compute one thing at a time: concurrent requests on a lane share its speed."""

    def __init__(self, by: BanditPlanner, directory: Directory, speed: Callable[[int, float], float]) -> None:
        self.by, self.directory, self.speed = by, directory, speed
        self.now = 0.0
        self.free_at: dict[NodeId, float] = {}
        self.taken: Counter[NodeId] = Counter()

    def run(self, clients: int, requests: int, tokens: int = 64) -> float:
        """Tokens per second of all clients together."""
        began, left = self.now, requests
        events: list[tuple[float, int, PlannedRoute, float]] = []
        for client in range(clients):
            left -= 1
            heapq.heappush(events, self._start(client, tokens))
        while events:
            self.now, client, route, started = heapq.heappop(events)
            self.by.finish(route, route.hops, tokens=tokens, seconds=self.now - started, failed=False, now=self.now)
            if left > 0:
                left -= 1
                heapq.heappush(events, self._start(client, tokens))
        return requests * tokens / (self.now - began)

    def _start(self, client: int, tokens: int) -> tuple[float, int, PlannedRoute, float]:
        route = self.by.choose(self.directory, DIGEST, 30, now=self.now)
        self.by.begin(route, self.now)
        lane = route.hops[0].node_id
        self.taken[lane] += 1
        start = max(self.now, self.free_at.get(lane, 0.0))
        self.free_at[lane] = start + tokens / self.speed(int(lane, 16), self.now)
        return self.free_at[lane], client, route, self.now


def equal(_lane: int, _now: float) -> float:
    return 32.0


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_equal_lanes_fill_evenly_under_as_many_clients(count: int) -> None:
    lanes_ = Lanes(BanditPlanner(seed=count), lanes(count), equal)
    lanes_.run(1, 6)
    assert lanes_.run(count, 100 * count) >= 0.95 * 32.0 * count
    lanes_ = Lanes(BanditPlanner(seed=count), lanes(count), equal)
    lanes_.run(1, 6)
    lanes_.taken.clear()
    assert lanes_.run(2 * count, 100 * count) >= 0.95 * 32.0 * count
    assert max(lanes_.taken.values()) <= 1.2 * min(lanes_.taken.values())


def test_shares_follow_a_lane_that_slows_down_and_recovers() -> None:
    slow_from, slow_until = 500.0, 2500.0

    def speed(lane: int, now: float) -> float:
        return 10.0 if lane == 1 and slow_from <= now < slow_until else 30.0

    by, directory = BanditPlanner(seed=8, explore_share=0.1, weight_alpha=4.0), lanes(2)
    room_ = Lanes(by, directory, speed)
    room_.run(1, 60)
    room_.now = slow_from
    room_.run(1, 60)
    shares = _shares(by, directory, room_.now)
    assert shares[0] == pytest.approx(1 / 82, abs=0.03)
    hindsight = room_.run(1, 60)
    assert hindsight >= 0.9 * 30.0
    room_.now = slow_until
    room_.run(1, 200)
    assert _shares(by, directory, room_.now)[0] >= 0.3


def test_shares_follow_measured_speeds_at_the_default_settings() -> None:
    by, directory = BanditPlanner(seed=8), lanes(2)
    room_ = Lanes(by, directory, lambda lane, now: 10.0 if lane == 1 and 500.0 <= now < 2500.0 else 30.0)
    room_.run(1, 20)
    room_.now = 500.0
    room_.run(1, 60)
    assert _shares(by, directory, room_.now)[0] == pytest.approx(0.25, abs=0.03)
    room_.now = 2500.0
    room_.run(1, 60)
    assert _shares(by, directory, room_.now)[0] == pytest.approx(0.5, abs=0.05)


def test_a_slowed_lane_costs_the_room_no_more_than_its_own_loss() -> None:
    by, directory = BanditPlanner(seed=8), lanes(2)
    room_ = Lanes(by, directory, lambda lane, now: 10.0 if lane == 1 and 500.0 <= now < 5000.0 else 30.0)
    assert room_.run(4, 100) >= 0.95 * 60.0
    room_.now = 500.0
    room_.run(4, 60)
    assert room_.run(4, 200) >= 0.9 * 40.0
    room_.now = 5000.0
    room_.run(4, 60)
    assert room_.run(4, 200) >= 0.95 * 60.0


def _shares(by: BanditPlanner, directory: Directory, now: float) -> Sequence[float]:
    table = {row["hops"][0]["name"]: row["expected_share"] for row in rows(by, directory, now)}
    return [table["n1"], table["n2"]]


def test_replacements_spread_over_equals() -> None:
    directory = room(member(1, (0, 15)), *(member(i, (15, 30)) for i in range(2, 6)))
    taken = set()
    for seed in range(60):
        got = BanditPlanner(seed=seed).replace(
            directory, DIGEST, LayerRange(15, 30), avoid={node(2)}, arith="a", now=0.0
        )
        assert got is not None
        taken.add(got[0].node_id)
    assert taken == {node(3), node(4), node(5)}
