"""The small pure parts: timers, ring, rumours, suspicion, guard, candidates, jam."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.gossip.candidates import MAX_CANDIDATES, Candidates
from meshd.gossip.guard import Guard
from meshd.gossip.jam import JamJudge
from meshd.gossip.ring import ROUNDS, Ring
from meshd.gossip.rumours import Rumours
from meshd.gossip.settings import PRESETS, GossipSettings
from meshd.gossip.suspicion import begin
from meshd.gossip.timers import Timers
from meshd.vocabulary import Endpoint, Health, NodeId
from tests.gossip.world import ME, OTHER, node

SETTINGS = GossipSettings()


# --- timers


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=30))
def test_what_is_due_at_the_deadline_is_never_nothing(steps: list[tuple[int, float]]) -> None:
    timers: Timers[int] = Timers()
    for key, when in steps:
        timers.set(key, when)
    last = dict(steps)
    fired: list[float] = []
    while timers.deadline() < inf:
        now = timers.deadline()
        due = list(timers.due(now))
        assert due
        assert all(last[key] == now for key in due)
        fired += [now] * len(due)
    assert fired == sorted(last.values())


def test_a_cancelled_timer_does_not_fire_and_a_later_one_replaces_none() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("b", 1.0)
    timers.cancel("a")
    timers.set_earlier("b", 2.0)
    assert timers.deadline() == 1.0
    assert list(timers.due(0.999)) == []
    assert list(timers.due(1.0)) == ["b"]


# --- ring


def test_in_one_round_everybody_is_probed_once_and_never_twice_by_the_same() -> None:
    ids = [node(i) for i in range(9)]
    rings = []
    for own in ids:
        ring = Ring(own)
        for other in ids:
            ring.add(other)
        rings.append(ring)
    seen: set[tuple[NodeId, NodeId | None]] = set()
    for _ in range(8):
        chosen = [ring.next() for ring in rings]
        assert sorted(map(str, chosen)) == sorted(ids)
        pairs = set(zip(ids, chosen, strict=True))
        assert not pairs & seen
        assert all(a != b for a, b in pairs)
        seen |= pairs


def test_rounds_fall_into_step_and_do_not_run_away() -> None:
    """Two members half a period out of phase, one far ahead and about to wrap."""
    a, b = Ring(ME), Ring(OTHER)
    for ring in (a, b):
        ring.add(ME)
        ring.add(OTHER)
    for ahead in (30_000, 60_000, ROUNDS - 4):
        a.heard(ahead)
        a.next()
    for ahead in (30_000, 60_000):
        b.heard(ahead)
        b.next()
    for _ in range(10):
        b.heard(a.round)
        b.next()
        a.heard(b.round)
        a.next()
    # Ten turns each since, over the end of the range; whoever turned last is at most one ahead.
    assert (b.round, a.round) == (5, 6)


def test_a_ring_of_one_probes_nobody() -> None:
    ring = Ring(ME)
    assert ring.next() is None
    ring.add(OTHER)
    ring.remove(OTHER)
    assert ring.next() is None


# --- rumours


def test_a_rumour_is_sent_so_often_and_the_least_told_first() -> None:
    rumours = Rumours()
    rumours.add(ME, "word", b"x" * 20)
    assert rumours.take(100, limit=3) == [b"x" * 20]
    rumours.add(OTHER, "word", b"y" * 20)
    assert rumours.take(25, limit=3) == [b"y" * 20]
    assert len(rumours.take(100, limit=3)) == 2
    assert len(rumours.take(100, limit=3)) == 2
    assert len(rumours) == 0


def test_a_newer_rumour_replaces_and_a_dropped_one_is_silent() -> None:
    rumours = Rumours()
    rumours.add(ME, "word", b"old" * 9)
    rumours.take(100, limit=3)
    rumours.add(ME, "word", b"new" * 9)
    rumours.add(ME, OTHER, b"accused" * 5)
    rumours.add(OTHER, ME, b"accused" * 5)
    rumours.drop_label(ME)
    rumours.drop(ME, OTHER)
    assert rumours.take(100, limit=3) == [b"new" * 9]
    rumours.drop(ME)
    assert rumours.take(100, limit=3) == []


@given(st.lists(st.integers(16, 300), max_size=40), st.integers(0, 1100))
def test_what_is_taken_fits(sizes: list[int], room: int) -> None:
    rumours = Rumours()
    for i, size in enumerate(sizes):
        rumours.add(node(i), "word", bytes(size))
    taken = rumours.take(room, limit=2)
    assert sum(map(len, taken)) <= room


def test_what_fits_is_found_behind_a_few_that_do_not_and_not_looked_for_behind_many() -> None:
    rumours = Rumours()
    rumours.add(ME, "word", bytes(20))
    for i in range(1, 21):
        rumours.add(node(i), "word", bytes(300))
    assert rumours.take(100, limit=9) == [bytes(20)]
    rumours.add(ME, "word", bytes(20))
    for i in range(1, 200):
        rumours.add(node(i), "word", bytes(300))
    assert rumours.take(100, limit=9) == []
    # It is told all the same, once those before it have had their turns.
    assert any(bytes(20) in rumours.take(1300, limit=9) for _ in range(100))


# --- suspicion


@pytest.mark.parametrize(("members", "shortest"), [(2, 4.0), (5, 4.0), (10, 4.0), (40, 4.0 * 1.60206), (1000, 12.0)])
def test_the_shortest_suspicion_grows_with_the_room(members: int, shortest: float) -> None:
    assert SETTINGS.suspicion_min_s(members) == pytest.approx(shortest, rel=1e-4)


def test_confirmations_shorten_a_suspicion_and_few_members_do_not_wait_for_them() -> None:
    s = begin(SETTINGS, incarnation=1, now=100.0, members=10, flaps=0)
    times = [s.deadline(accusers, able=8) - 100 for accusers in (1, 2, 3, 4)]
    assert times[0] == 24.0
    assert times[0] > times[1] > times[2] == times[3] == 4.0
    assert s.deadline(1, able=0) == 104.0  # nobody is left who could confirm
    assert begin(SETTINGS, incarnation=1, now=0.0, members=3, flaps=0).deadline(1, able=1) == 4.0


def test_a_member_that_flaps_gets_longer_but_not_for_ever() -> None:
    def longest(flaps: float) -> float:
        return begin(SETTINGS, incarnation=1, now=0.0, members=3, flaps=flaps).deadline(1, 1)

    assert longest(1) == 4.0
    assert longest(3) == 8.0
    assert longest(50) == 12.0


# --- guard


def test_silence_of_everybody_is_isolation_for_a_while_and_only_among_several() -> None:
    guard = Guard(SETTINGS, now=0.0)
    assert guard.isolated_until(2.9, live_peers=4) is None
    assert guard.isolated_until(3.0, live_peers=4) == 8.0
    assert guard.isolated_until(3.0, live_peers=1) is None
    assert guard.isolated_until(8.0, live_peers=4) is None
    assert guard.heard(5.0, live_peers=4) == 5.0
    assert guard.heard(5.5, live_peers=4) == 0.0


def test_a_loop_that_did_not_run_is_a_pause() -> None:
    guard = Guard(SETTINGS, now=0.0)
    guard.expects(10.0)
    assert guard.entered(4.0) == 0.0
    assert guard.entered(11.0) == 0.0
    assert guard.entered(70.0) == 60.0


# --- candidates


def test_candidates_are_bounded_and_joins_are_kept() -> None:
    candidates = Candidates()
    asked = Endpoint("10.0.0.1", 8091)
    assert candidates.add([asked, asked], "join") == [asked]
    crowd = [Endpoint("10.1.0.1", 1000 + i) for i in range(2 * MAX_CANDIDATES)]
    candidates.add(crowd, "mdns")
    assert len(candidates.unmet([], lambda _: False)) == MAX_CANDIDATES
    assert candidates.via([asked]) == "join"
    candidates.remove([asked], "mdns")
    assert asked in candidates.unmet([], lambda _: False)
    candidates.ours(asked)
    assert candidates.add([asked], "join") == []
    assert asked not in candidates.unmet([], lambda _: False)
    candidates.moved()
    assert asked in candidates.unmet([], lambda _: False)


# --- jam


def test_jam_needs_two_bad_samples_and_four_good_ones() -> None:
    judge = JamJudge(cores=2)
    bad, good = Health(ram_free_mb=10, ram_total_mb=1000), Health(ram_free_mb=500, ram_total_mb=1000)
    assert [judge.judge(h, 0.0) for h in (bad, good, bad, bad)] == [False, False, False, True]
    assert [judge.judge(h, 0.0) for h in (good, good, good, bad, good, good, good, good)] == [True] * 7 + [False]


def test_between_the_two_limits_nothing_changes() -> None:
    judge = JamJudge(cores=2)
    between = Health(ram_free_mb=45, ram_total_mb=1000)
    assert not any(judge.judge(between, 0.0) for _ in range(5))
    for _ in range(2):
        judge.judge(Health(ram_free_mb=10, ram_total_mb=1000), 0.0)
    assert all(judge.judge(between, 0.0) for _ in range(9))


@pytest.mark.parametrize(
    ("health", "lag_s", "cause"),
    [
        (Health(load1=17.0), 0.0, "load"),
        (Health(temp_c=99.0), 0.0, "heat"),
        (Health(battery_pct=3, on_ac=False), 0.0, "battery"),
        (Health(), 1.5, "lag"),
    ],
)
def test_each_cause_counts(health: Health, lag_s: float, cause: str) -> None:
    assert JamJudge(cores=2).causes(health, lag_s) == [cause]


def test_mains_power_forgives_an_empty_battery() -> None:
    assert JamJudge(cores=2).causes(Health(battery_pct=3, on_ac=True), 0.0) == []


# --- settings


def test_presets_are_the_public_names_and_the_test_one_is_the_room_faster() -> None:
    assert set(PRESETS) == {"room", "lan", "test"}
    assert PRESETS["test"].period_s == pytest.approx(PRESETS["room"].period_s / 5)
    assert PRESETS["test"].ping_repeats_s[1] == pytest.approx(0.025)
    assert PRESETS["test"].transmissions(40) == 12
