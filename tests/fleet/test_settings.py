"""The meshd.toml of a device."""

from __future__ import annotations

from pathlib import Path

from meshd.config import load
from meshd.fleet.hosts import Device
from meshd.fleet.settings import ports_of, settings, text_of
from meshd.vocabulary import Endpoint, LayerRange

SEEDS = ["10.0.0.1:8091", "10.0.0.2:8091", "10.0.0.3:8091", "10.0.0.4:8091"]


def test_the_daemon_reads_what_is_written(tmp_path: Path) -> None:
    device = Device("a", layers="0..15", capacity_mb=900, flags=("--no-mdns", "--threads", "2"))
    text = text_of(settings(device, model="hash:30,layer_mb=1", flags=["--kv-reserve", "0.3"], seeds=SEEDS, before=""))
    path = tmp_path / "meshd.toml"
    path.write_text(text)
    config = load(["--config", str(path)], {})
    assert (config.model, config.layers, config.capacity_mb) == ("hash:30,layer_mb=1", LayerRange(0, 15), 900)
    assert (config.mdns, config.threads, config.kv_reserve) == (False, 2, 0.3)
    assert config.join == tuple(Endpoint.parse(seed, 0) for seed in SEEDS[:3])


def test_a_second_run_writes_the_same_whoever_is_alive_by_then() -> None:
    device = Device("a")
    for seeds in ([], SEEDS[:1]):
        first = text_of(settings(device, model="m", flags=[], seeds=seeds, before=""))
        assert text_of(settings(device, model=None, flags=[], seeds=SEEDS, before=first)) == first


def test_a_file_by_another_hand_is_replaced() -> None:
    assert settings(Device("a"), model=None, flags=[], seeds=SEEDS[:1], before='model = "theirs"\n') == {
        "join": SEEDS[:1]
    }


def test_a_device_knows_itself_better_than_the_command() -> None:
    device = Device("a", flags=("--threads", "2"))
    assert settings(device, model=None, flags=["--threads", "4"], seeds=[], before="") == {"threads": "2"}


def test_the_firewall_opens_the_ports_that_are_used() -> None:
    assert ports_of({}) == (8090, 8091)
    assert ports_of({"http": "0.0.0.0:80", "mesh": "[::]:9000"}) == (80, 9000)
    assert ports_of({"http": "fd00::5", "mesh": "10.0.0.5"}) == (8090, 8091)
    assert ports_of({"http": "here:there", "mesh": True}) == (8090, 8091)
