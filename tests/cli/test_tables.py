"""What a person reads where a script would take ``--json``."""

from __future__ import annotations

import io

from rich.console import Console

from meshd.cli.tables import status_table


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
