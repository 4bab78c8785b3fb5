"""mass-equip against hosts with sshd: one command makes a room, and what is done to it later loses no request.

The tests share five hosts and run in the order in which a fleet lives; each leaves the room whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshd.cli.chaos.netlab import NetLab
from meshd.fleet.device import facts
from tests.fleet.numbers import LAYERS
from tests.fleet.town import ROOT, Town, kill, newer, until, wheels
from tests.netlab import machine

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(machine.lacking()), reason=f"hosts with sshd cannot be made here: {machine.lacking()}"),
]


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with NetLab(6) as net:
        town = Town(net, tmp_path_factory.mktemp("town"))
        try:
            yield town
        finally:
            town.off()


@pytest.fixture(scope="module")
def first_run(town: Town) -> dict[str, Any]:
    """Five fresh devices are named, the fifth is not switched on."""
    for host in town.hosts[:4]:
        host.boot()
    return town.equip(*town.hosts, expect=1)


def by_host(document: dict[str, Any], host: machine.Machine) -> dict[str, Any]:
    return next(item for item in document["devices"] if item["host"] == f"root@{host.address}")


def test_one_command_makes_a_room_and_a_dead_device_stops_nobody(town: Town, first_run: dict[str, Any]) -> None:
    assert [item["ok"] for item in first_run["devices"]] == [True] * 4 + [False]
    assert "refused" in first_run["devices"][4]["error"]
    assert {item["service"] for item in first_run["devices"][:4]} == {"cron"}
    assert all(item["layers"] and item["state"] == "ready" for item in first_run["devices"][:4])
    assert len({item["node_id"] for item in first_run["devices"][:4]}) == 4
    until(town.healthy, "two proven replicas of everything")
    assert (town.hosts[1].home / ".local/share/meshd/mesh.key").stat().st_mode & 0o777 == 0o600


def test_a_second_run_changes_nothing(town: Town, first_run: dict[str, Any]) -> None:
    before = [town.daemon(host) for host in town.hosts[:4]]
    dry = town.command(*town.hosts[:4], "--dry-run")
    again = town.equip(*town.hosts[:4])
    assert [item["changes"] for item in (*dry["devices"], *again["devices"])] == [[]] * 8
    assert [town.daemon(host) for host in town.hosts[:4]] == before


def test_a_killed_daemon_and_a_rebooted_device_come_back_without_a_hand(town: Town, first_run: dict[str, Any]) -> None:
    killed, rebooted = town.hosts[0], town.hosts[1]
    old, layers = town.daemon(killed), town.get("/status", rebooted)["layers"]
    kill(killed, old)
    rebooted.power_off()
    rebooted.boot()
    until(lambda: town.daemon(killed) not in (0, old), "a new daemon after kill -9")
    until(lambda: (town.get("/status", rebooted) or {}).get("state") == "ready", "the rebooted device to serve")
    assert town.get("/status", rebooted)["layers"] == layers  # what its disk has
    until(town.healthy, "two proven replicas of everything")


def test_a_device_that_comes_later_takes_the_thinnest_range(town: Town, first_run: dict[str, Any]) -> None:
    town.hosts[3].power_off()
    until(lambda: town.healthy(1) and not town.healthy(2), "the room to notice that a replica is gone")
    town.hosts[4].boot()
    start, end = by_host(town.equip(town.hosts[4]), town.hosts[4])["layers"]
    counts = [0] * LAYERS
    for a, b, replicas in town.get("/mesh/hive", town.hosts[0])["stages"]:
        counts[a:b] = [replicas - (start <= layer < end) for layer in range(a, b)]
    thinnest = {layer for layer, others in enumerate(counts) if others == min(counts)}
    assert thinnest <= set(range(start, end))  # what the others hold least, which may have moved since the loss
    town.hosts[3].boot()
    until(town.healthy, "two proven replicas of everything")


def test_the_key_is_changed_under_load_and_a_stolen_device_shut_out(town: Town, first_run: dict[str, Any]) -> None:
    thief, stay = town.hosts[4], town.hosts[:4]
    thief_id = town.get("/status", thief)["node_id"]
    ring = town.office.home / ".config/meshd/fleet/mesh.key"
    before = ring.read_text().strip()
    with town.streams(*stay) as seen:
        done = town.command("rotate-key", "--except", thief.address)
    assert seen["wrong"] == []
    assert seen["least"] > 0
    assert {item["host"] for item in done["devices"]} == {f"root@{host.address}" for host in stay}
    (after,) = ring.read_text().split()
    assert after != before
    for host in stay:
        state = host.home / ".local/share/meshd"
        assert facts.key_lines((state / "mesh.key").read_text()) == [after]
        assert thief_id in (state / "blocked").read_text()

    def forgotten() -> bool:
        peers = town.get("/mesh/peers", town.hosts[0])["peers"]
        return all(peer["state"] in ("dead", "left") for peer in peers if peer["node_id"] == thief_id)

    until(forgotten, "the room to lose sight of the stolen device")
    thief.power_off()
    until(town.healthy, "two proven replicas of everything")


def test_the_room_is_upgraded_under_load(town: Town, first_run: dict[str, Any], tmp_path: Path) -> None:
    town.wheels = wheels(newer(ROOT, tmp_path / "source", "0.9.9"), tmp_path / "wheels")
    stay = town.hosts[:4]
    with town.streams(*stay) as seen:
        upgraded = town.command("upgrade")
    assert seen["wrong"] == []
    assert seen["least"] > 0
    assert {item["version"] for item in upgraded["devices"]} == {"0.9.9"}
    assert all(town.get("/status", host)["version"] == "0.9.9" for host in stay)
    until(town.healthy, "two proven replicas of everything")


def test_a_removed_device_keeps_nothing_but_its_identity(town: Town, first_run: dict[str, Any]) -> None:
    gone = town.hosts[2]
    town.command("remove", gone)
    assert town.daemon(gone) == 0
    assert not (gone.home / ".meshd").exists()
    assert not (gone.home / ".local/share/meshd/mesh.key").exists()
    assert (gone.home / ".local/share/meshd/node.key").exists()
    assert "meshd" not in gone.run(["crontab", "-l"]).stdout
    listed = town.command("status")
    assert {item["host"] for item in listed["devices"]} == {f"root@{town.hosts[i].address}" for i in (0, 1, 3)}


def test_ssh_never_asks_for_a_password(town: Town) -> None:
    (town.office.home / "key").rename(town.office.home / "elsewhere")
    document = town.command("status", "root@" + town.hosts[0].address, expect=1)
    (town.office.home / "elsewhere").rename(town.office.home / "key")
    assert "never asks for a password" in document["devices"][0]["error"]
