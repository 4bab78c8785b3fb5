"""What waiting for a model shows."""

from __future__ import annotations

import pytest

from meshd.cli.bars import bars
from meshd.errors import UsageError


def test_a_refusal_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line prints it; nothing of the bars may stand before."""
    with pytest.raises(UsageError), bars():
        raise UsageError("no such file")
    assert capsys.readouterr().err == ""


def test_progress_is_shown_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with bars() as progress:
        progress("copy", 5, 10)
        progress("check", 10, 10)
    written = capsys.readouterr()
    assert written.out == ""
    assert "copy" in written.err
    assert "check" in written.err
