"""Whom a node lets answer in its place."""

from __future__ import annotations

import pytest

from meshd.directory import Directory
from meshd.node.pass_on import entries
from tests.api.rig import member
from tests.fakes.chain import N1, N2


@pytest.mark.parametrize(
    ("digest", "layers", "admitted", "trusted"),
    [
        ("d1", (0, 30), True, True),
        ("d1", (0, 30), None, False),
        ("d1", (0, 30), False, False),
        ("d1", None, None, True),
        ("d2", (0, 4), None, True),
        ("d2", (0, 4), False, False),
    ],
)
def test_who_holds_layers_must_have_proven_them_where_that_can_be_judged(
    digest: str, layers: tuple[int, int] | None, admitted: bool | None, trusted: bool
) -> None:
    me = member(N1, "n1", (0, 30), digest="d1")
    room = Directory(N1).replace([me, member(N2, "n2", layers, digest=digest, admitted=admitted)])
    assert [found.node_id for found in entries(room, "")] == ([N2] if trusted else [])
