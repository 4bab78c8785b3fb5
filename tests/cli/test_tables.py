"""What a person reads where a script would take ``--json``."""

from __future__ import annotations

import io

from rich.console import Console

from meshd.cli.tables import headline, peers_table, status_table
from tests.doctor.documents import peer


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


def test_a_node_that_starts_is_not_yet_among_its_peers() -> None:
    shown = io.StringIO()
    Console(file=shown, width=160).print(
        peers_table({"self": None, "peers": [{**peer("n2", None), "last_heard_s": 1.0}]})
    )
    assert "n2" in shown.getvalue()
    assert "this node" not in shown.getvalue()
