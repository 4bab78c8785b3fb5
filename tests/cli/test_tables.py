"""What a person reads where a script would take ``--json``."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from meshd.cli import run
from meshd.cli.room import console
from meshd.cli.tables import headline, hive_table, peers_table, status_table
from tests.api.rig import Rig, served
from tests.doctor.documents import hive, peer


def lines(document: dict[str, object]) -> list[list[str]]:
    shown = io.StringIO()
    Console(file=shown, width=100).print(status_table(document))
    return [line.split() for line in shown.getvalue().splitlines()]


def test_a_status_is_a_row_a_fact_and_says_nothing_of_what_is_not_there() -> None:
    document = {"name": "n1", "layers": [0, 15], "warnings": ["a", "b"], "counters": {"a": 1, "b": 2}, "queue_depth": 0}
    assert lines({**document, "reason": "", "device": None, "mesh_ids": []}) == [
        ["name", "n1"],
        ["layers", "0..15"],
        ["warnings", "a"],
        ["b"],
        ["counters", "a=1", "b=2"],
        ["queue_depth", "0"],
    ]
    assert lines({"layers": None}) == []


def test_a_room_without_a_model_is_told_once() -> None:
    assert headline({"model": None, "status": "no model"}).plain == "no model"
    assert headline({"model": "tiny", "status": "healthy"}).plain == "tiny: healthy"
    with console.capture() as shown:
        console.print(hive_table(hive(model=None, digest=None, status="no model", stages=[], jammed=[])))
    assert shown.get().split() == ["no", "model"]


def test_a_node_that_starts_is_not_yet_among_its_peers() -> None:
    shown = io.StringIO()
    Console(file=shown, width=160).print(
        peers_table({"self": None, "peers": [{**peer("n2", None), "last_heard_s": 1.0}]})
    )
    assert "n2" in shown.getvalue()
    assert "this node" not in shown.getvalue()


def test_what_others_say_is_shown_as_it_stands() -> None:
    said = {"mesh": "[fd00:100:a::2]:8091", "reason": "[/x] off by [b]", "warnings": ["[errno 2]"]}
    with console.capture() as shown:
        console.print(status_table(said))
    lines = [line.split(maxsplit=1)[1].strip() for line in shown.get().splitlines()]
    assert lines == ["[fd00:100:a::2]:8091", "[/x] off by [b]", "[errno 2]"]


def test_a_narrow_terminal_shows_fewer_columns_and_those_whole() -> None:
    other = {**peer("n2", [15, 30]), "mesh": "[fd00:100::2]:8091", "last_heard_s": 0.2}
    nodes = {"self": peer("n1", [0, 15]), "peers": [other]}

    def shown(width: int) -> str:
        out = io.StringIO()
        Console(file=out, width=width, markup=False, emoji=False).print(peers_table(nodes))
        return out.getvalue()

    assert shown(160).split("\n")[0].split() == [
        *("name", "state", "role", "layers", "admitted", "heard", "rtt", "queue", "tok/s", "free", "address")
    ]
    assert shown(80).split("\n")[0].split() == ["name", "state", "role", "layers", "admitted", "heard", "address"]
    assert "[fd00:100::2]:8091" in shown(80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown(80)


def test_nobody_admits_the_dead() -> None:
    out = io.StringIO()
    dead = {**peer("n2", [15, 30]), "state": "dead", "admitted": None, "last_heard_s": 9.0}
    Console(file=out, width=160).print(peers_table({"self": peer("n1", [0, 15]), "peers": [dead]}))
    assert "not yet" not in out.getvalue()


def test_a_pipe_is_given_each_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def sleep(_seconds: float) -> None:
        seen.append(capsys.readouterr().out)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("meshd.cli.room.time.sleep", sleep)
    with served(Rig()) as url:
        assert run(["hive", "--watch", "--url", url]) == 0
    assert ["layers" in table for table in seen] == [True, True]


def interrupted(_seconds: float) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_is_how_watching_ends_and_the_verdict_is_on_what_was_seen_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.cli.room.time.sleep", interrupted)
    with served(Rig()) as url:
        assert run(["peers", "--watch", "--url", url]) == 0
        assert run(["hive", "--watch", "--check", "--url", url]) == 3


@pytest.mark.parametrize("command", ["peers", "hive", "routes", "status"])
def test_one_document_cannot_be_kept_up_to_date(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--watch", "--json"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("--watch"), len(said.err.splitlines())) == ("", 1, 1)
