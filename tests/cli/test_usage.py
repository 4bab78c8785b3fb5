"""What the command line says to whoever did not say enough."""

from __future__ import annotations

import io
import sys

import pytest

from meshd.cli import run


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
