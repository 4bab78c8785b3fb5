"""What the command line says to whoever did not say enough."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from meshd.cli import ask, run
from meshd.client import Client, RequestFailed
from tests.api.rig import Rig, served


@pytest.mark.parametrize("words", [[], ["key"], ["identity"], ["service"]])
def test_a_group_without_its_command_is_wrong_usage_and_says_what_there_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """So a script that forgot a word does not go on as if something had been done (click has done so since 8.2)."""
    assert run(words) == 2
    said = capsys.readouterr()
    assert "Usage: meshd" in said.err
    assert "Commands:" in said.err
    assert not said.out


@pytest.mark.parametrize("group", [[], ["key"], ["identity"], ["service"]])
def test_the_list_of_commands_fits_a_terminal(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*group, "--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert commands
    assert "..." not in commands


def test_bytes_that_are_no_text_are_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the locale is strict the reading fails, elsewhere what was read cannot be sent."""
    for errors in ("strict", "surrogateescape"):
        for words in (["ask", "-"], ["chat"], ["key", "add", "-"]):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), "utf-8", errors))
            assert run(words) == 2
            assert capsys.readouterr().err == "meshd: standard input is not UTF-8 text\n"
    for flag, argv in (("PROMPT", ["ask", "\udcff"]), ("--system", ["ask", "x", "--system", "\udcff"])):
        assert run(argv) == 2
        assert capsys.readouterr().err == f"meshd: {flag} is not UTF-8 text\n"


def test_a_closed_standard_input_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for words in (["ask", "-"], ["chat"], ["key", "add"]):
        assert run(words) == 2
        assert capsys.readouterr().err == "meshd: standard input is closed\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["plan", "hash:30", "--nodes", "1e308,1e308"], "--nodes: 1e+308"),
        (["plan", "hash:30", "--nodes", "nan,2400", "--json"], "--nodes: nan"),
        (["plan", "hash:30", "--nodes", "inf"], "--nodes: inf"),
        (["plan", "hash:30", "--nodes=-5"], "--nodes: -5"),
        (["plan", "hash:30", "--nodes", "24,x"], "--nodes: '24,x'"),
        (["plan", "hash:30", "--nodes", "24,24", "--speeds", "nan,1"], "--speeds: nan"),
        (["plan", "hash:30", "--nodes", "24,24", "--speeds", "0,0"], "--speeds: 0"),
        (["plan", "hash:30", "--nodes", "24,24", "--speeds=-inf,1"], "--speeds: -inf"),
        (["plan", "hash:30", "--nodes", "24", "--kv-reserve", "nan"], "--kv-reserve"),
        (["elect", "--seed", "127.0.0.1:9", "--capacity-mb", "9" * 400], "--capacity-mb"),
        (["ask", " "], "PROMPT is empty"),
        (["ask", "", "--raw"], "PROMPT is empty"),
        (["ask", "hi", "--temperature", "99"], "--temperature"),
        (["ask", "hi", "--temperature", "nan"], "--temperature"),
        (["ask", "hi", "--max-tokens", "99999999"], "--max-tokens"),
        (["ask", "hi", "--seed", "99999999999999999999"], "--seed"),
        (["ask", "hi", "--raw", "--system", "Be brief."], "--system"),
        (["chat", "--temperature", "inf"], "--temperature"),
        (["drain", "--timeout", "nan"], "--timeout"),
        (["wait", "--timeout", "-1"], "--timeout"),
        (["demo", "--chaos", "inf"], "--chaos"),
        (["bench", "--max-tokens", "99999999"], "--max-tokens"),
        (["rm", ""], "''"),
        (["rm", "../x"], "'../x'"),
        (["qspec", ""], "''"),
        (["pull", ""], "''"),
    ],
)
def test_values_that_cannot_be_are_wrong_usage(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    said = capsys.readouterr()
    assert not said.out
    assert named in said.err
    assert len(said.err.splitlines()) == 1


def test_a_model_that_is_not_there_is_no_wrong_usage(tmp_path: Path) -> None:
    for command in ("rm", "qspec"):
        assert run([command, "nosuch", "--state-dir", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("param", "most"), [("max_tokens", ask.MAX_TOKENS), ("temperature", ask.MAX_TEMPERATURE), ("seed", ask.MAX_SEED)]
)
def test_what_a_node_takes_is_what_the_flags_take(param: str, most: float) -> None:
    with served(Rig()) as url, Client(url) as room:
        room.ask("x", **{param: most})
        with pytest.raises(RequestFailed, match=param):
            room.ask("x", **{param: most + 1})
