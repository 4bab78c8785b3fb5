"""Layers that do not fit the memory a node gives: refused before anything is allocated, in words that say how much is missing.

Layers of 100 MB: 15 of them take 1500 MB, and with a fifth kept for KV 1875 MB are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.client import RequestFailed
from tests import rooms
from tests.rooms import daemon, one_line, ports, tried, until

pytestmark = pytest.mark.daemon


def test_a_pinned_range_ends_the_start(tmp_path: Path) -> None:
    http, mesh = ports()
    flags = ["--model", "hash:30", "--layers", "15..30", "--capacity-mb", "1000", "--http", http, "--mesh", mesh]
    ran = daemon(*flags, home=tmp_path)
    assert ran.returncode == 1
    said = one_line(ran.stderr)
    assert "15..30" in said
    assert "MB" in said
    assert "Traceback" not in ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def tight() -> Iterator[LocalRoom]:
    """n1 holds 0..15; n2 would take anything, but gives less than one layer needs."""
    with LocalRoom("hash:30") as room:
        room.add("n1", "--layers", "0..15", "--capacity-mb", "1875")
        room.add("n2", "--capacity-mb", "100")
        room.wait(nodes=2, replicas=0, timeout_s=rooms.PATIENCE_S, at=["n1"])
        yield room


def test_an_elected_node_says_why_it_holds_nothing(tight: LocalRoom) -> None:
    with tight.client("n2") as client:
        status = until(
            lambda: (found := tried(lambda: client.get("/status"))) and found["reason"].count("MB") and found, "reason"
        )
    assert status["state"] == "observer"
    assert status["layers"] is None


def test_its_neighbour_answers_at_once(tight: LocalRoom) -> None:
    took_s = []
    for name in ("n1", "n2", "n1"):
        began = time.monotonic()
        with tight.client(name) as client, pytest.raises(RequestFailed) as failure:
            client.post("/chain", {"prompt": "anybody there?"})
        took_s.append(time.monotonic() - began)
        assert failure.value.http_status == 503
        assert failure.value.error["message"].startswith("stage 15..30 unavailable")
    assert min(took_s) < 1.0  # nothing is waited for; the machine may hold up one of them
