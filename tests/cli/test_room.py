"""Where commands look for the room and its key."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from meshd.api.guards import Access, Guards
from meshd.cli import run
from meshd.cli.room import api_key, state_dir
from meshd.config import default_state_dir
from meshd.identity.mesh_key import MeshKey
from tests.api.rig import Rig, served


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


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://[::1", "http://xn--zz", "http://..", "ftp://n1"])
@pytest.mark.parametrize("command", [["peers"], ["ask", "hi"], ["wait"], ["doctor"], ["dashboard"], ["resume"]])
def test_what_is_no_address_is_wrong_usage(command: list[str], url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--url", url]) == 2
    assert capsys.readouterr().err == f"meshd: --url: {url!r} is not an address such as http://HOST:8090\n"


@pytest.mark.parametrize("command", [["drain", "--url", ""], ["peers", "--url", " , "], ["elect", "--seed", ""]])
def test_an_empty_address_is_not_this_device(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A script whose variable is empty would drain the node that it runs on."""
    assert run(command) == 2
    assert capsys.readouterr().err == f"meshd: {command[1]}: no address given\n"


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MESHD_URL", "")
    monkeypatch.setattr("meshd.cli.room.DEFAULT_URL", "http://127.0.0.1:9")
    assert run(["peers"]) == 1
    assert "http://127.0.0.1:9: " in capsys.readouterr().err


def test_the_flag_that_holds_no_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["elect", "--seed", "http://.."]) == 2
    assert "--seed: " in capsys.readouterr().err


@pytest.mark.parametrize("key", ["secret-1\nX", "secret-1 X", "secret-1\x7f", "secret-1\udcff"])
def test_a_key_that_cannot_be_one_is_wrong_usage_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "MESHD_API_KEY": key})
    assert run(["status"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("meshd: MESHD_API_KEY holds")
    assert len(said.splitlines()) == 1
    assert "secret" not in said


def test_a_line_end_after_a_key_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHD_API_KEY", "given\n")
    assert api_key(tmp_path) == "given"


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may not be searched. Root may search any, so the refusal is played."""
    look = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.is_relative_to(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, follow_symlinks=follow_symlinks)

    monkeypatch.delenv("MESHD_API_KEY", raising=False)
    monkeypatch.delenv("MESHD_MESH_KEY", raising=False)
    monkeypatch.setenv("MESHD_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(Path, "stat", stat)
    return tmp_path


@pytest.mark.parametrize("command", [["peers"], ["ask", "hi"], ["doctor"], ["bench"], ["wait"]])
def test_a_state_folder_that_may_not_be_searched_is_named(
    command: list[str], closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"meshd: --state-dir (MESHD_STATE_DIR): {closed}/mesh.key")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", [["key", "new"], ["key", "add", MeshKey(bytes(32)).line()], ["key", "show"]])
def test_a_key_file_that_may_not_be_looked_at_is_named(
    command: list[str], closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 1
    assert capsys.readouterr().err.startswith("meshd: --mesh-key: ")


def test_a_damaged_mesh_key_says_what_a_client_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MESHD_API_KEY", raising=False)
    monkeypatch.setenv("MESHD_MESH_KEY", str(tmp_path / "k"))
    (tmp_path / "k").write_text("x")
    (tmp_path / "k").chmod(0o600)
    assert run(["peers"]) == 1
    said = capsys.readouterr().err
    assert "is damaged" in said
    assert said.endswith("or give an API key in MESHD_API_KEY\n")


@pytest.mark.parametrize("command", [["peers"], ["ask", "hi"], ["drain"], ["wait", "--ready"]])
def test_a_node_that_wants_a_key_is_no_reason_to_wait_and_the_line_says_where_it_goes(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHD_API_KEY", "nobodys")
    with served(Rig(), guards=Guards(Access(trust_loopback=False))) as url:
        assert run([*command, "--url", url]) == 1
    said = capsys.readouterr().err
    assert "this key is not known" in said
    assert said.endswith("prints it, for MESHD_API_KEY\n")
