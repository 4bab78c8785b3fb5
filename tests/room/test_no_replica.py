"""Layers that nobody holds: said at once, and over as soon as somebody does. Neighbours known by ``--next`` alone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.client import RequestFailed
from tests import rooms
from tests.rooms import FLAGS, PROMPT, expected, streamed, tried, until

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def static() -> Iterator[LocalRoom]:
    """n1 holds 0..15 and is told of n2 and n3 (15..30), which are not started yet and know nobody."""
    with LocalRoom(rooms.MODEL) as room:
        for name in ("n2", "n3"):
            room.add(name, "--layers", "15..30", *FLAGS, join=False)
            room.kill(name)
        known = ",".join(room.nodes[name].mesh for name in ("n2", "n3"))
        room.add("n1", "--layers", "0..15", "--next", known, *FLAGS, join=False)
        with room.client("n1") as client:
            until(lambda: (tried(lambda: client.get("/status")) or {}).get("state") == "ready", "n1 is ready")
        yield room


def refused(room: LocalRoom) -> RequestFailed:
    with room.client("n1") as client, pytest.raises(RequestFailed) as failure:
        client.post("/chain", {"prompt": PROMPT, "max_tokens": 4})
    return failure.value


def test_the_missing_layers_are_named_at_once(static: LocalRoom) -> None:
    took_s = []
    for _ in range(3):
        began = time.monotonic()
        failure = refused(static)
        took_s.append(time.monotonic() - began)
    assert failure.http_status == 503
    assert failure.error["code"] == "stage_unavailable"
    assert failure.error["message"].startswith("stage 15..30 unavailable: no live replica")
    assert failure.error["missing"] == [[15, 30]]
    assert min(took_s) < 1.0  # nothing is waited for; the machine may hold up one of them
    with static.client("n1") as client:
        hive = client.get("/mesh/hive")
        assert (hive["status"], hive["missing"]) == ("broken: layers 15..30 missing", [[15, 30]])
        with pytest.raises(RequestFailed) as not_ready:
            client.get("/readyz")
        assert not_ready.value.http_status == 503


def test_a_replica_that_comes_is_used_and_a_dead_one_missed(static: LocalRoom) -> None:
    with static.client("n1") as client:
        for name, other in (("n2", "n3"), ("n3", "n2")):
            static.kill(other)
            static.start(name)
            ready = until(lambda name=name: [e for e in static.nodes[name].events() if e["ev"] == "ready"], name)  # type: ignore[misc]  # bound above
            answer = until(lambda: tried(lambda: client.post("/chain", {"prompt": PROMPT, "max_tokens": 4})), "answer")
            assert time.time() - ready[-1]["t"] < 5.0  # a second is promised; this machine is not to be trusted with it
            assert answer["tokens"] == expected(PROMPT, 4)
            assert [hop["name"] for hop in answer["route"]] == ["n1", name]


def test_the_last_replica_dies_and_comes_back(static: LocalRoom) -> None:
    static.kill("n2")
    static.start("n3")
    with static.client("n1") as client:
        until(lambda: tried(lambda: client.post("/chain", {"prompt": PROMPT})), "n3 serves")
        with pytest.raises(RequestFailed) as failure:
            streamed(client, strike=lambda _names: static.kill("n3"), hops=(1,), after=20)
        assert failure.value.error["code"] == "stage_unavailable"
        assert failure.value.error["missing"] == [[15, 30]]
        static.start("n3")
        assert until(lambda: tried(lambda: client.post("/chain", {"prompt": PROMPT, "max_tokens": 4})), "n3 serves")
