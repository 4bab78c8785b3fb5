"""Rooms in the simulator: what a user would see of deaths, returns, bad radios and clocks. Cases carry their id."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from meshd.gossip import advert_wire
from meshd.gossip.settings import GossipSettings
from meshd.vocabulary import NodeId, NodeStatus
from tests.sim.gossip_net import SimNet, endpoint, node_id
from tests.sim.gossip_script import run as run_script

SWITCHES = ["lifeguard", "fresh_timer", "tell_accused", "isolation_guard", "flap_damping", "verify_suspicions"]


def room(size: int, *, seed: int = 1, settings: GossipSettings | None = None, health: bool = False) -> SimNet:
    net = SimNet(settings, seed=seed, health=health)
    net.start_many(size)
    assert net.agreed()
    return net


def member_names(net: SimNet, observer: int) -> dict[NodeId, str]:
    return {m.node_id: m.advert.name for m in net.core(observer).members(net.local(net.nodes[observer]))}


@pytest.mark.parametrize(
    ("size", "suspect_s", "dead_s"), [(2, 2.5, 7.0), (3, 3.0, 7.0), (5, 3.0, 7.0), (10, 3.0, 7.5), (20, 3.0, 9.5)]
)
def test_a_killed_node_is_suspect_soon_and_dead_in_time_everywhere(size: int, suspect_s: float, dead_s: float) -> None:
    for seed in range(3):
        net = room(size, seed=seed)
        at = net.now
        net.kill(1)
        net.run(dead_s)
        suspected, died = net.times("suspect", 1, at), net.times("failed", 1, at)
        assert len(died) == len(suspected) == size - 1
        assert max(suspected.values()) <= suspect_s
        assert max(died.values()) <= dead_s


def test_join_restart_and_leave_are_seen_by_all_within_half_a_second() -> None:
    net = room(10)
    at = net.now
    net.kill(3)
    net.run(0.2)
    net.start(3, join=(0,))
    net.run(0.7)
    assert len(net.times("join", 3, at)) == 9
    at = net.now
    net.start(10, join=(4,))
    net.run(0.5)
    assert len(net.times("join", 10, at)) == 10
    at = net.now
    net.leave(10)
    net.run(0.5)
    assert len(net.times("left", 10, at)) == 10
    net.run(20)
    assert not net.times("failed", 10, at)
    assert not net.times("failed", 3, 0.0)


def test_half_a_room_without_power_is_noticed() -> None:
    net = room(6)
    at = net.now
    for i in (1, 2, 3):
        net.kill(i)
    net.run(10)
    for i in (1, 2, 3):
        assert len(net.times("failed", i, at)) == 3


def test_the_last_one_left_notices_too() -> None:
    net = room(5)
    for i in (1, 2, 3, 4):
        net.kill(i)
    net.run(20)
    assert [net.state(0, i) for i in (1, 2, 3, 4)] == [NodeStatus.DEAD] * 4


@pytest.mark.parametrize("loss", [0.1, 0.2])
def test_lost_datagrams_kill_nobody(loss: float) -> None:
    net = room(20)
    net.faults.loss = loss
    at = net.now
    net.run(60)
    assert not [s for s in net.seen if s.at >= at and s.name == "failed"]
    net.faults.loss = 0.0
    net.run(5)
    assert net.agreed()


def test_a_short_blink_of_ones_radio_kills_nobody() -> None:
    """Nothing heard for three seconds: it is we who are gone, so nobody is judged."""
    net = room(5)
    at = net.now
    net.unplug(1)
    net.run(5)
    net.plug(1)
    net.run(3)
    assert not [s for s in net.seen if s.at >= at and s.name == "failed" and s.observer == 1]
    assert net.agreed()


def test_a_partition_heals() -> None:
    net = room(12)
    net.partition(range(5), range(5, 12))
    net.run(40)
    assert net.core(0).live_peers == 4
    assert net.core(11).live_peers == 6
    net.heal()
    net.run_until(net.agreed, 10)


def test_d03_one_way_link_is_shown_and_kills_nobody() -> None:
    net = room(3)
    at = net.now
    net.faults.udp_cut.add((0, 1))
    net.run(30)
    assert not [s for s in net.seen if s.at >= at and s.name in ("suspect", "failed")]
    one_way = {(o, m.advert.name) for o in range(3) for m in net.core(o).members(net.local(net.nodes[o])) if m.one_way}
    assert one_way == {(0, "n1"), (1, "n0")}
    net.heal()
    net.run(5)
    assert not any(m.one_way for m in net.core(0).members(net.local(net.nodes[0])))


def test_d03_who_never_heard_a_node_itself_knows_it_by_hearsay_only() -> None:
    net = SimNet(replace(GossipSettings(), tcp_check=False), seed=4)
    net.start(0)
    net.start(2, join=(0,))
    net.run(1)
    net.faults.cut.update({(0, 1), (1, 0)})
    net.start(1, join=(2,))
    net.run(10)
    hearsay = next(m for m in net.core(1).members(net.local(net.nodes[1])) if m.node_id == node_id(0))
    assert hearsay.state is NodeStatus.ALIVE
    assert hearsay.last_heard_s is None
    assert hearsay.one_way


def test_d05_five_restarts_leave_no_ghosts() -> None:
    net = room(3)
    for _ in range(5):
        net.kill(1)
        net.run(0.5)
        net.start(1, join=(0,))
        net.run(1.5)
        assert all(len(member_names(net, i)) == 3 for i in range(3))
    net.run(10)
    assert net.agreed()


def test_m14_a_restart_at_another_address_replaces_the_old_one() -> None:
    net = room(3)
    at = net.now
    net.kill(1)
    net.move(1, 7)
    net.run(0.5)
    net.start(1, join=(0,))
    net.run(1.0)
    assert set(net.times("join", 1, at)) == {0, 2}
    for observer in (0, 2):
        assert net.core(observer).addresses_of(node_id(1)) == (endpoint(1, 7),)
    assert not [s for s in net.seen if s.name == "conflict"]


def test_m16_no_two_clocks_agree_and_a_step_is_only_a_pause() -> None:
    net = room(5)
    at = net.now
    net.nodes[1].clock_offset += 86_400.0  # ahead by a day, as after a sleep the clock counted
    net.run(20)
    assert not [s for s in net.seen if s.at >= at and s.name in ("failed", "suspect")]
    assert net.times("pause", 1, at)
    assert net.agreed()


def test_m18_a_frozen_node_is_dead_and_back_within_a_second_of_its_thaw() -> None:
    net = room(5)
    at = net.now
    net.freeze(2)
    net.run(60)
    assert len(net.times("failed", 2, at)) == 4
    at = net.now
    net.thaw(2)
    net.run(1.0)
    assert net.agreed()
    assert net.times("pause", 2, at)
    assert not [s for s in net.seen if s.at >= at and s.observer == 2 and s.name in ("suspect", "failed")]


def test_d09_forty_peers_with_many_addresses_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimNet.advert

    def many(self: SimNet, node: object) -> object:
        advert = plain(self, node)  # type: ignore[arg-type]  # the wrapped method's own argument
        others = tuple(endpoint(advert.num_layers, i) for i in range(100, 123))
        return replace(advert, addresses=(*advert.addresses, *others))

    monkeypatch.setattr(SimNet, "advert", many)
    net = SimNet(seed=2, health=True)
    for i in range(40):
        net.start(i, join=(0,) if i else ())
    net.run(10)
    assert net.agreed()
    assert max(node.largest for node in net.nodes.values()) <= 1200


def test_bytes_do_not_grow_with_the_room() -> None:
    rates = []
    for size in (5, 50):
        net = SimNet(seed=3)
        net.start_many(size)
        net.run(10)
        before = sum(n.sent_bytes + n.link_bytes for n in net.nodes.values())
        net.run(60)
        rates.append((sum(n.sent_bytes + n.link_bytes for n in net.nodes.values()) - before) / 60 / size)
    assert rates[1] == pytest.approx(rates[0], rel=0.1)
    assert max(rates) <= 300


@pytest.mark.parametrize(("size", "most"), [(5, 1000), (20, 1000), (40, 1100)])
def test_bytes_with_health(size: int, most: int) -> None:
    net = SimNet(seed=3, health=True)
    net.start_many(size)
    before = sum(n.sent_bytes + n.link_bytes for n in net.nodes.values())
    net.run(20)
    assert (sum(n.sent_bytes + n.link_bytes for n in net.nodes.values()) - before) / 20 / size <= most


def test_health_reaches_everybody() -> None:
    net = room(20, health=True)
    net.run(5)
    for observer in range(20):
        for m in net.core(observer).members(net.local(net.nodes[observer])):
            assert m.health.ram_total_mb == 16000


def test_the_window_detector_finds_a_death_in_its_window() -> None:
    net = room(6, settings=GossipSettings(detector="window"))
    at = net.now
    net.kill(1)
    net.run(9.5)
    died = net.times("failed", 1, at)
    assert len(died) == 5
    assert 7 <= min(died.values()) <= max(died.values()) <= 9.1
    net.start(1, join=(0,))
    net.run(2)
    assert net.agreed()


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_rule_can_be_switched_off_and_the_room_still_works(switch: str) -> None:
    without: dict[str, Any] = {switch: False}
    net = room(5, settings=GossipSettings(**without))
    at = net.now
    net.kill(2)
    net.run(10)
    assert len(net.times("failed", 2, at)) == 4
    net.start(2, join=(0,))
    net.run(2)
    assert net.agreed()


@pytest.mark.parametrize("seed", range(12))
def test_a_room_agrees_after_any_script_of_faults(seed: int) -> None:
    run_script(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12, 400))
def test_a_room_agrees_after_many_more_scripts(seed: int) -> None:
    run_script(seed)


def thousand(monkeypatch: pytest.MonkeyPatch) -> SimNet:
    """A settled room of 1,000; equal adverts are decoded once, or a million of them would take most of the time."""
    monkeypatch.setattr(advert_wire, "decode_untrusted", lru_cache(maxsize=4096)(advert_wire.decode_untrusted))
    net = SimNet(seed=1)
    net.start_settled(1000)
    net.run(3)
    assert net.agreed()
    return net


@pytest.mark.soak
def test_a_thousand_nodes_notice_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    net = thousand(monkeypatch)
    at = net.now
    net.kill(500)
    net.run(15)
    assert len(net.times("failed", 500, at)) == 999


@pytest.mark.soak
def test_a_thousand_nodes_agree_after_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    net = thousand(monkeypatch)
    net.partition(range(500), range(500, 1000))
    net.run(120)
    net.heal()
    net.run_until(net.agreed, 15, step_s=0.5)
