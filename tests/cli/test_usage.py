"""What the command line says to whoever did not say enough."""

from __future__ import annotations

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
