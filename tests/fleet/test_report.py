"""What a command says on stdout when it could not do what it was told."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from meshd.fleet.command import main
from meshd.fleet.hosts import Device
from meshd.fleet.ledger import alone
from meshd.fleet.outcome import Outcome, table


def test_a_dry_run_that_fails_does_not_say_that_there_is_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "nowhere"
    assert main(["u@127.0.0.1:9", "--wheels", str(place), "--dry-run", "--fleet", str(tmp_path / "fleet")]) == 1
    said = capsys.readouterr()
    assert "nothing" not in said.out
    assert f"mass-equip: --wheels {place}: no wheels there" in said.err


def test_a_dry_run_that_looked_at_all_says_so() -> None:
    assert table([Outcome(Device("one"))], dry_run=True).endswith("nothing to do")


def test_a_quote_that_is_not_closed_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one", "--flags", '--name "shelf', "--fleet", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "mass-equip: --flags: No closing quotation\n"


def test_two_runs_do_not_change_one_fleet_at_the_same_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with alone(tmp_path):
        assert main(["remove", "one", "--fleet", str(tmp_path)]) == 1
        assert "another mass-equip" in capsys.readouterr().err
        assert main(["status", "--fleet", str(tmp_path)]) == 2  # looking is free; nobody is known yet
    with alone(tmp_path):
        pass


def test_a_disk_without_room_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_words: object, **_more: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert main(["one", "--fleet", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"mass-equip: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}\n"
