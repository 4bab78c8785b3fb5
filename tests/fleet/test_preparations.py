"""Each preparation's shell, run against tools that are fakes: it does what is needed, once, and takes it back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshd.fleet.device import places, preparing, shell
from meshd.fleet.device.shell import Trouble
from meshd.fleet.preparations import Preparation, preparations

BY_NAME = {step.name: step for step in preparations(8090, 8091)}


class Tools:
    """A PATH with programs that only this test knows; each writes down how it was called."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.bin = place / "bin"
        self.bin.mkdir()

    def add(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.place}/calls\n{script}\n')
        path.chmod(0o755)

    def sh(self, script: str) -> int:
        path = f"{self.bin}:/usr/bin:/bin"
        return subprocess.run(["sh", "-e", "-c", script], env={"PATH": path}, check=False, timeout=60).returncode

    @property
    def calls(self) -> list[str]:
        path = self.place / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


@pytest.mark.parametrize("step", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize("part", ["check", "do", "undo"])
def test_the_shell_is_posix(step: Preparation, part: str) -> None:
    ended = subprocess.run(
        ["sh", "-n", "-c", getattr(step, part)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_firewall_that_is_on_is_opened_once_and_closed_again(tools: Tools) -> None:
    rules = tools.place / "rules"
    rules.write_text("Status: active\n")
    tools.add(
        "ufw",
        f'case "$1" in status) cat {rules} ;; allow) echo "$2    ALLOW    Anywhere" >> {rules} ;;'
        f' delete) grep -v "^$3 " {rules} > {rules}.new; mv {rules}.new {rules} ;; esac',
    )
    step = BY_NAME["ufw"]
    assert tools.sh(step.check) == preparing.TO_DO
    assert tools.sh(step.do) == 0
    assert tools.sh(step.check) == preparing.FINE
    assert tools.sh(step.undo) == 0
    assert rules.read_text() == "Status: active\n"


def test_a_firewall_that_is_off_is_left_alone(tools: Tools) -> None:
    tools.add("ufw", "echo Status: inactive")
    assert tools.sh(BY_NAME["ufw"].check) == preparing.FINE


def test_firewalld_is_asked_for_every_port(tools: Tools) -> None:
    opened = tools.place / "opened"
    opened.touch()
    tools.add(
        "firewall-cmd",
        f'case "$*" in --query-port=*) grep -q "${{1#--query-port=}}" {opened} ;;'
        f' *--add-port=*) echo "$2" >> {opened} ;; *--remove-port=*) : > {opened} ;; esac',
    )
    step = BY_NAME["firewalld"]
    assert tools.sh(step.check) == preparing.TO_DO
    assert tools.sh(step.do) == 0
    assert tools.sh(step.check) == preparing.FINE
    assert opened.read_text().split() == [
        f"--add-port={port}" for port in ("8090/tcp", "8091/tcp", "8091/udp", "5353/udp")
    ]


def test_rules_by_hand_are_told_and_not_touched(tools: Tools) -> None:
    tools.add("nft", 'echo "type filter hook input priority 0; policy drop;"')
    assert tools.sh(BY_NAME["nftables"].check) == preparing.NOT_OURS
    assert tools.calls == ["nft list ruleset"]


def test_a_radio_that_sleeps_is_seen(tools: Tools) -> None:
    tools.add("iw", 'case "$*" in dev) printf "phy#0\\n\\tInterface wlan0\\n" ;; *get*) echo "Power save: on" ;; esac')
    assert tools.sh(BY_NAME["wifi-power-save"].check) == preparing.TO_DO
    tools.add("iw", 'case "$*" in dev) printf "phy#0\\n\\tInterface wlan0\\n" ;; *get*) echo "Power save: off" ;; esac')
    assert tools.sh(BY_NAME["wifi-power-save"].check) == preparing.FINE


# --- the device's part ------------------------------------------------------------------------------------------------


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(preparing, "privilege", lambda: "root")
    return tmp_path


def a_step(place: Path, *, needs_root: bool = False, undo: bool = True) -> dict[str, object]:
    path = place / "thing"
    return Preparation(
        name="thing",
        change="make the thing",
        check=f"[ -f {path} ] || exit 10",
        do=f"touch {path}",
        undo=f"rm {path}" if undo else "",
        needs_root=needs_root,
    ).json()


def test_a_preparation_is_done_once_and_undone(device: Path) -> None:
    step = a_step(device)
    assert preparing.check([step]) == [{"name": "thing", "state": "todo", "text": "make the thing"}]
    preparing.do(step)
    assert preparing.check([step])[0]["state"] == "fine"
    assert preparing.undo_all() == ["thing"]
    assert not (device / "thing").exists()
    assert preparing.undo_all() == []


def test_the_way_back_is_stored_before_the_change(device: Path) -> None:
    step = a_step(device) | {"do": f"touch {device}/thing; exit 1"}
    with pytest.raises(Trouble, match="make the thing"):
        preparing.do(step)
    assert (places.undo() / "thing").exists()
    assert preparing.undo_all() == ["thing"]
    assert not (device / "thing").exists()


def test_a_change_without_effect_is_said(device: Path) -> None:
    with pytest.raises(Trouble, match="without effect"):
        preparing.do(a_step(device) | {"do": "true"})


def test_an_undo_that_fails_is_kept(device: Path) -> None:
    preparing.do(a_step(device) | {"undo": "exit 1"})
    with pytest.raises(Trouble, match="undoing thing"):
        preparing.undo_all()
    assert (places.undo() / "thing").exists()


def test_who_may_not_is_told_what_is_missing(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "privilege", lambda: "user")
    monkeypatch.setattr(shell, "privilege", lambda: "user")
    (found,) = preparing.check([a_step(device, needs_root=True)])
    assert found["state"] == "warn"
    assert "needs root" in found["text"]
