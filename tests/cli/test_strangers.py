"""Commands at an address where something else answers: one line that names it, and nothing that was not done is said."""

from __future__ import annotations

import pytest

from meshd.cli import run
from tests.client.stranger import stranger

COMMANDS = (["peers"], ["hive"], ["routes"], ["status"], ["doctor"], ["bench"], ["drain"], ["resume"], ["ask", "hi"])


@pytest.mark.parametrize("body", ["{}", "[]", '"x"'])
def test_it_is_named_and_nothing_is_said_to_be_done(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    with stranger(body.encode()) as url:
        asked = [*([*words, "--url", url] for words in COMMANDS), ["elect", "--seed", url]]
        for words in [*asked, ["wait", "--ready", "--timeout", "0", "--url", url]]:
            assert run(words) == 1, words
            said = capsys.readouterr()
            assert not said.out.strip(), words
            assert url in said.err
            assert len(said.err.splitlines()) == 1
            assert "internal error" not in said.err
