"""Commands at an address where something else answers: one line that names it, and nothing that was not done is said."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from meshd.cli import run
from tests.api.rig import Rig, served
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


HALVES: list[tuple[list[str], str, list[str | int], Any]] = [
    (["peers"], "/mesh/peers", ["peers", 0, "role"], None),
    (["peers"], "/mesh/peers", ["self", "layers"], [15, 0]),
    (["peers"], "/mesh/peers", ["peers", 0, "status"], {}),
    (["hive"], "/mesh/hive", ["stages", 0], [0, 15]),
    (["hive"], "/mesh/hive", ["single", 0], [0, 15, 1]),
    (["wait", "--ready", "--timeout", "0"], "/mesh/hive", ["nodes"], "2"),
    (["status"], "/status", ["layers"], 5),
    (["doctor", "--no-probe"], "/mesh/room", ["hive", "loading"], [{}]),
    (["doctor", "--no-probe"], "/mesh/room", ["events"], [5]),
    (["doctor", "--no-probe"], "/mesh/room", ["peers", "peers", 0, "layer_ms"], "fast"),
    (["elect"], "/mesh/model", ["embed_bytes"], None),
    (["elect"], "/mesh/model", ["layer_bytes"], [1, 2]),
]


@pytest.mark.parametrize(("words", "path", "place", "bad"), HALVES)
def test_what_is_half_right_is_told_with_the_place(
    words: list[str], path: str, place: list[str | int], bad: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(Rig()) as url:
        document = httpx.get(url + path, trust_env=False).json()
    at = document
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = bad
    with stranger(json.dumps(document).encode()) as url:
        assert run([*words, "--seed" if words[0] == "elect" else "--url", url]) == 1
        said = capsys.readouterr().err
    assert url in said
    assert str(place[-1] if isinstance(place[-1], str) else place[-2]) in said
    assert len(said.splitlines()) == 1
    assert "internal error" not in said


def test_an_answer_that_is_half_right_is_told_with_the_place(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"id": "1", "seed": 1},
        {"tokens": [5], "text": "x"},
        {"finish_reason": "stop", "tokens": [5], "text": "x"},
    ]
    with stranger(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)) as url:
        assert run(["ask", "hi", "--max-tokens", "1", "--show-route", "--url", url]) == 1
        said = capsys.readouterr().err
    assert url in said
    assert "internal error" not in said
