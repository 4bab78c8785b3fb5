"""Devices whose clocks are days apart, and step by hours while they serve, form a room and stay in it.

Liveness that compares wall clocks of two machines evicts the healthy ones, and certificates and replay windows that do refuse
them. The same with simulated clocks: tests/gossip/test_rooms.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import PATIENCE_S, PROMPT, meshd

pytestmark = pytest.mark.daemon

DAY_S = 86_400

# Python imports this module by itself; the clock is read through it before anything of meshd is loaded.
LYING_CLOCK = """
import pathlib, time
offset, true = pathlib.Path(__file__).with_name("offset_s"), time.time
time.time = lambda: true() + float(offset.read_text())
time.time_ns = lambda: int(time.time() * 1e9)
"""


def clock(folder: Path, offset_s: int) -> Path:
    """A folder for PYTHONPATH that puts a process's wall clock off."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LYING_CLOCK)
    step(folder, offset_s)
    return folder


def step(folder: Path, offset_s: int) -> None:
    new = folder / "new"
    new.write_text(str(offset_s))
    new.replace(folder / "offset_s")


def test_m16_a_room_of_clocks_that_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    assert meshd("key", "new", "--mesh-key", str(key)).returncode == 0
    common = ("--capacity-mb", "100", "--mesh-key", str(key))
    with LocalRoom("hash:4,layer_mb=1", common=common) as room:
        clocks = {}
        for name, layers, offset_s in (("n1", "0..2", DAY_S), ("n2", "2..4", -DAY_S), ("n3", "2..4", 0)):
            clocks[name] = clock(tmp_path / name, offset_s)
            monkeypatch.setenv("PYTHONPATH", str(clocks[name]))
            room.add(name, "--layers", layers)
        monkeypatch.delenv("PYTHONPATH")
        room.wait(nodes=3, timeout_s=PATIENCE_S)
        with room.client("n1") as client:
            first = client.ask(PROMPT, max_tokens=16)
            step(clocks["n1"], DAY_S + 3600)
            step(clocks["n2"], -DAY_S - 3600)
            again = [client.ask(PROMPT, route=["n1", name], max_tokens=16)["tokens"] for name in ("n2", "n3") * 3]
            assert again == [first["tokens"]] * 6
            assert client.get("/status")["counters"]["rejected_datagrams"] == 0
        seen = {name: [event["ev"] for event in room.nodes[name].events()] for name in room.nodes}
        assert not [(name, ev) for name, evs in seen.items() for ev in evs if ev in ("failed", "conflict")]
        told = {name: room.nodes[name].events()[0]["t"] for name in room.nodes}
        assert told["n1"] - DAY_S / 2 > told["n3"] > told["n2"] + DAY_S / 2  # the clocks did lie
