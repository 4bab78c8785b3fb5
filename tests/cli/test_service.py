"""``meshd service`` with systemctl and crontab that only write down what they were told; the script is run for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshd.cli import run, service
from meshd.fleet.device import boot_files
from tests import rooms

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What the programs were told. The crontab is a file."""
    programs = tmp_path / "programs"
    programs.mkdir()
    table, diary = tmp_path / "crontab.txt", tmp_path / "diary"
    scripts = {
        "systemctl": f'echo "systemctl $*" >> {diary}; [ "$2" != show ] && [ "$1" != show ] || printf "MainPID=77\\n"',
        "loginctl": f'echo "loginctl $*" >> {diary}',
        "crontab": f'if [ "$1" = - ]; then cat > {table}; else cat {table} 2>/dev/null; fi',
    }
    for name, text in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SUDO_USER", raising=False)
    return lambda: "".join(path.read_text() for path in (table, diary) if path.exists())


def test_a_user_unit_is_installed_shown_and_removed(
    told: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "has_systemd", lambda: True)
    state = tmp_path / "state of mine"
    assert run(["service", "install", "--user", "--state-dir", str(state)]) == 0
    unit = tmp_path / "home/.config/systemd/user/meshd.service"
    text = unit.read_text()
    assert f'"{state}"' in text
    assert "User=" not in text
    for line in ("Type=notify", "WatchdogSec=30", "Restart=always", "NoNewPrivileges=yes", "WantedBy=default.target"):
        assert line in text.splitlines()
    assert "systemctl --user restart meshd" in told()
    assert "loginctl enable-linger" in told()
    capsys.readouterr()
    assert run(["service", "status", "--user", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pid"] == 77
    assert run(["service", "uninstall", "--user"]) == 0
    assert not unit.exists()
    assert "systemctl --user disable --now meshd" in told()
    assert run(["service", "status", "--user"]) == service.NOT_RUNNING


def test_a_system_unit_needs_root_and_runs_as_who_called_sudo(
    told: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "has_systemd", lambda: True)
    monkeypatch.setattr(service, "_SYSTEM_UNIT", tmp_path / "meshd.service")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(["service", "install", "--state-dir", str(tmp_path)]) == 1
    assert "--user" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "chown", lambda *_: None)
    monkeypatch.setenv("SUDO_USER", "nobody")
    assert run(["service", "install", "--state-dir", str(tmp_path / "s")]) == 0
    text = (tmp_path / "meshd.service").read_text()
    for line in ("User=nobody", "ProtectSystem=strict", "CapabilityBoundingSet=", "WantedBy=multi-user.target"):
        assert line in text.splitlines()
    assert f'ReadWritePaths="{tmp_path / "s"}"' in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "meshd.service"
    unit.write_text(boot_files.unit(Path("/bin/true"), tmp_path / "a b%c$d", user="root"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_example_unit_is_what_is_installed() -> None:
    example = (DEPLOY / "meshd.service").read_text()
    made = boot_files.unit(
        Path("/home/meshd/.venv/bin/meshd"), Path("/home/meshd/.local/share/meshd"), user="meshd", author=service.AUTHOR
    )
    assert example == made


@pytest.mark.daemon
def test_without_systemd_a_script_keeps_the_node_running(
    told: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "has_systemd", lambda: False)
    state = tmp_path / "state"
    state.mkdir()
    http, mesh = rooms.ports()
    (state / "meshd.toml").write_text(f'model = "hash:4"\nhttp = "{http}"\nmesh = "{mesh}"\nmdns = false\n')
    (tmp_path / "crontab.txt").write_text("0 4 * * * mine\n")
    arguments = ["--state-dir", str(state)]
    assert run(["service", "install", *arguments]) == 0
    try:
        assert f"@reboot setsid {state}/service/run" in told()
        assert "0 4 * * * mine" in told()
        lock = state / "lock"
        rooms.until(lambda: lock.exists() and lock.read_text().strip(), "a daemon holds the state folder")
        assert run(["service", "status", *arguments]) == 0
        first = int(lock.read_text())
        os.kill(first, 9)
        rooms.until(lambda: lock.read_text().strip() not in ("", str(first)), "it is started anew")
    finally:
        assert run(["service", "uninstall", *arguments]) == 0
    assert told() == "0 4 * * * mine\n"
    assert run(["service", "status", *arguments]) == service.NOT_RUNNING
    assert not Path(f"/proc/{lock.read_text().strip()}").exists()


def test_the_program_is_the_one_of_this_environment() -> None:
    assert service._program() == Path(sys.executable).with_name("meshd")
