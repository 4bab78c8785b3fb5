"""When a start is over: only then is the ready line told."""

from __future__ import annotations

import pytest

from meshd.inference.keeper import Held
from meshd.node.join_check import mesh_port_untrusted
from meshd.node.status import settled, state_of


@pytest.mark.parametrize(
    ("named", "found", "why", "expects", "over"),
    [
        (True, True, "", True, False),  # the election has not decided
        (True, True, "too small for one layer of m: 9 MB short (20 MB needed)", True, True),
        (True, False, "", True, False),
        (True, False, "fetching m", True, False),
        (False, False, "", True, False),  # joined a room whose model is not known yet
        (False, False, "", False, True),  # nobody to wait for
    ],
)
def test_an_observer(named: bool, found: bool, why: str, expects: bool, over: bool) -> None:
    state, reason = state_of(Held("observer"), draining="", named=named, found=found, pinned=False, why=why)
    assert settled(state, reason, expects=expects) is over


def test_what_it_waits_for_is_told() -> None:
    state, reason = state_of(Held("observer"), draining="", named=True, found=False, pinned=False, why="")
    assert (state, "neighbours" in reason) == ("starting", True)


def test_who_serves_is_ready() -> None:
    assert settled("ready", "", expects=True)
    assert not settled("draining", "ordered", expects=True)


@pytest.mark.parametrize(
    ("body", "port"),
    [
        (b'{"mesh":"0.0.0.0:7001"}', 7001),
        (b'{"mesh":"[::]:7001"}', 7001),
        (b'{"mesh":"x:y"}', None),
        (b'{"mesh":5}', None),
        (b'{"error":{}}', None),
        (b"[]", None),
        (b"[" * 10_000, None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_the_mesh_port_out_of_a_strangers_answer(body: bytes, port: int | None) -> None:
    assert mesh_port_untrusted(b"HTTP/1.1 200 \r\nX: y\r\n\r\n" + body) == port
