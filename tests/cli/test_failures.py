"""Whatever goes wrong is told in one line and by the exit status."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from meshd.cli import app, run
from meshd.errors import LocalError, StateError, UsageError
from tests.api.rig import Rig, served


def failing(problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a command that ends with this."""

    def fail(_: list[str]) -> int:
        raise problem

    monkeypatch.setattr(app, "run_app", fail)
    return run(["peers"])


@pytest.mark.parametrize(
    ("problem", "status", "line"),
    [
        (LocalError("no"), 1, "no"),
        (UsageError("no"), 2, "no"),
        (StateError("the key is damaged", param="--mesh-key"), 1, "--mesh-key: the key is damaged"),
        (StateError("choose another with --state-dir", param="--state-dir"), 1, "choose another with --state-dir"),
        (LocalError("of others", param="messages"), 1, "of others"),
        (LocalError("two\n\nlines \x1b[2J"), 1, "two; lines ?[2J"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, "/x/y: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the output cannot be written: No space left on device"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "Too many open files"),
    ],
)
def test_errors_are_one_line(
    problem: BaseException,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert failing(problem, monkeypatch) == status
    assert capsys.readouterr().err == f"meshd: {line}\n"


@pytest.mark.parametrize(
    "problem", [KeyError("owned"), BaseExceptionGroup("of tasks", [ExceptionGroup("inner", [KeyError("owned")])])]
)
def test_a_fault_of_ours_is_one_line_too_and_says_how_to_see_more(
    problem: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(problem, monkeypatch) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "internal error: KeyError: 'owned'" in said
    assert "MESHD_TRACEBACK=1" in said
    monkeypatch.setenv("MESHD_TRACEBACK", "1")
    with pytest.raises((KeyError, BaseExceptionGroup)):
        failing(problem, monkeypatch)


def meshd(*words: str, out: str) -> subprocess.CompletedProcess[str]:
    """The command in a process and a shell of its own; ``out`` says where its output goes. It prints its exit status."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {out}; echo "${{PIPESTATUS[0]}}" >&2', "bash", sys.executable, "-m", "meshd", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    with served(Rig()) as url:
        for words in (["ask", "hi", "--max-tokens", "50"], ["peers"], ["status", "--json"], ["--help"]):
            assert (
                meshd(*words, *(["--url", url] if len(words) > 1 or words == ["peers"] else []), out="| true").stderr
                == "0\n"
            )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [["status", "--json"], ["peers"], ["ask", "hi"]])
def test_output_that_cannot_be_written_is_a_failure(words: list[str]) -> None:
    with served(Rig()) as url:
        said = meshd(*words, "--url", url, out="> /dev/full").stderr
    assert said == "meshd: the output cannot be written: No space left on device\n1\n"


def test_a_closed_output_is_none() -> None:
    with served(Rig()) as url:
        assert meshd("ask", "hi", "--url", url, out=">&-").stderr == "0\n"
