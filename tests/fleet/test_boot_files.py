"""What starts meshd at boot."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshd.fleet.device.boot_files import cron_table, run_script, unit, without_cron_line

HOME = Path("/home/pi/.meshd")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("user", ["root", None])
def test_systemd_has_nothing_to_say_against_the_unit(tmp_path: Path, user: str | None) -> None:
    program = tmp_path / "with space and 100%/meshd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "meshd.service"
    path.write_text(unit(program, tmp_path, user=user))
    shown = subprocess.run(
        ["systemd-analyze", "verify", *(["--user"] if user is None else []), path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    about_ours = [line for line in (shown.stdout + shown.stderr).splitlines() if "meshd" in line]
    assert about_ours == []


def test_the_unit_runs_as_who_logged_in() -> None:
    text = unit(Path("/x/meshd"), Path("/y"), user="pi")
    assert "\nUser=pi\n" in text
    assert "WantedBy=multi-user.target" in text
    assert "User=" not in unit(Path("/x/meshd"), Path("/y"), user=None)


@pytest.mark.parametrize("before", ["", "0 5 * * * backup\n", "0 5 * * * backup"])
def test_a_crontab_keeps_what_was_in_it(before: str) -> None:
    after = cron_table(before, HOME)
    assert after == cron_table(after, HOME)
    assert after.count("@reboot") == 1
    assert without_cron_line(after).splitlines() == before.splitlines()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """`run` with a daemon that notes its pid and lives until it is told to stop."""
    (tmp_path / "run").write_text(run_script(tmp_path, tmp_path / "meshd", tmp_path / "state"))
    (tmp_path / "meshd").write_text(
        f'#!/bin/sh\necho $$ >> {tmp_path}/pids\ntrap "exit 0" TERM\n[ ! -f {tmp_path}/usage ] || exit 2\n'
        "while :; do sleep 0.05; done\n"
    )
    for name in ("run", "meshd"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


def pids(home: Path) -> list[int]:
    path = home / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_daemon_that_dies_is_started_again_and_one_that_is_told_to_stop_is_not(home: Path) -> None:
    keeper = subprocess.Popen([home / "run"])
    until(lambda: len(pids(home)) == 1)
    second = subprocess.run([home / "run"], timeout=60, check=False)  # a second keeper has nothing to do
    assert second.returncode == 0
    os.kill(pids(home)[0], signal.SIGKILL)
    until(lambda: len(pids(home)) == 2)
    keeper.terminate()
    assert keeper.wait(timeout=60) == 0
    assert not Path(f"/proc/{pids(home)[1]}").exists()
    assert not (home / "run.pid").exists()
    assert len(pids(home)) == 2


def test_wrong_usage_is_not_tried_again(home: Path) -> None:
    (home / "usage").touch()
    assert subprocess.run([home / "run"], timeout=60, check=False).returncode == 0
    assert len(pids(home)) == 1


def test_the_log_of_a_daemon_that_never_ends_is_kept_short(home: Path) -> None:
    script = run_script(home, home / "meshd", home / "state", look_s=0.1)
    (home / "run").write_text(script)
    daemon = (home / "meshd").read_text()
    (home / "meshd").write_text(daemon.replace("while :", "head -c 10000001 /dev/zero; echo on\nwhile :"))
    keeper = subprocess.Popen([home / "run"])
    log = home / "log"
    until(lambda: (home / "log.1").exists() and log.stat().st_size < 10_000_000)
    assert len(pids(home)) == 1
    keeper.terminate()
    assert keeper.wait(timeout=60) == 0
    assert (log.stat().st_size, (home / "log.1").stat().st_size) == (0, 10_000_004)
