"""Where commands look for the room and its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.cli import run
from meshd.cli.room import api_key, state_dir
from meshd.config import default_state_dir


def test_the_state_folder_is_the_given_one_else_the_variables_else_the_platforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHD_STATE_DIR", raising=False)
    assert state_dir(None) == default_state_dir()
    monkeypatch.setenv("MESHD_STATE_DIR", str(tmp_path))
    assert state_dir(None) == tmp_path
    assert state_dir(tmp_path / "given") == tmp_path / "given"


def test_commands_on_a_member_have_the_key_that_its_owner_can_give_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("MESHD_API_KEY", "MESHD_MESH_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MESHD_STATE_DIR", str(tmp_path))
    assert api_key(state_dir(None)) is None
    assert run(["key", "new"]) == 0
    capsys.readouterr()
    assert run(["key", "show", "--api"]) == 0
    assert api_key(state_dir(None)) == capsys.readouterr().out.strip()
    monkeypatch.setenv("MESHD_API_KEY", "given")
    assert api_key(state_dir(None)) == "given"
