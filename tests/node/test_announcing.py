"""The line by which a node says what it is ready for."""

from __future__ import annotations

import io

import pytest

from meshd.directory import Directory
from meshd.eventlog import EventLog
from meshd.models.hash_model import parse_hash_model
from meshd.node.announcing import Announcer
from meshd.vocabulary import Endpoint, LayerRange, NodeId

ME = NodeId("0" * 32)


@pytest.mark.parametrize(
    ("state", "layers", "line"),
    [
        (("ready", ""), LayerRange(0, 6), "ready me hash:12 0..6 http://h:1 mesh m:2 0 peers healthy\n"),
        (
            ("observer", "too small for one layer of hash:12"),
            None,
            "ready me hash:12 no layers http://h:1 mesh m:2 0 peers healthy; too small for one layer of hash:12\n",
        ),
    ],
)
def test_a_node_without_layers_says_why(state: tuple[str, str], layers: LayerRange | None, line: str) -> None:
    out = io.StringIO()
    announcer = Announcer(EventLog(ME, "me", out=out), Endpoint("h", 1), Endpoint("m", 2))
    for _ in range(2):  # told once
        announcer.ready(state, parse_hash_model("hash:12").spec, layers, Directory(ME), expects=True)
    assert out.getvalue() == line
