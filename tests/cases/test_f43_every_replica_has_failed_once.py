"""A replica that failed is missed for a while, but never so that nobody is left; a dead one is not tried for ever.

That a room without any replica says so at once is tests/room/test_no_replica.py.
"""

from __future__ import annotations

import time

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.client import RequestFailed
from tests import rooms
from tests.rooms import FLAGS, PATIENCE_S, PROMPT, expected, streamed, tried, until

pytestmark = pytest.mark.daemon


def test_penalties_never_leave_nobody(four_halves: LocalRoom) -> None:
    with four_halves.client("e0") as client:
        for name in ("n2", "n4"):  # each of the two replicas of 15..30 fails one request
            seen = streamed(
                client,
                strike=lambda _names, name=name: four_halves.freeze(name),  # type: ignore[misc]  # bound above
                after=5,
                route=["n1", name],
                max_tokens=32,
            )
            assert seen.tokens == expected(PROMPT, 32)
            assert seen.final["recoveries"][0]["from"] == name
            four_halves.thaw(name)
            four_halves.wait(replicas=2, timeout_s=PATIENCE_S, at=["e0"])
        assert client.post("/chain", {"prompt": PROMPT, "max_tokens": 4})["tokens"] == expected(PROMPT, 4)


def test_a_dead_replica_is_tried_three_times_at_most(four_halves: LocalRoom) -> None:
    with four_halves.client("e0") as client:
        ids = {peer["name"]: peer["node_id"] for peer in client.get("/mesh/peers")["peers"]}
        client.post("/chain", {"prompt": PROMPT, "route": ["n1", "n2"]})
        four_halves.kill("n2")
        before = attempts_at(ids["n2"], four_halves)
        for number in range(100):
            question = f"question {number}"
            assert client.post("/chain", {"prompt": question})["tokens"] == expected(question, 1)
    assert attempts_at(ids["n2"], four_halves) - before <= 3


def attempts_at(node_id: str, room: LocalRoom) -> int:
    """How often a request had to be taken away from a node. On a busy machine a hop that is well may be hedged too."""
    failovers = [event for event in room.nodes["e0"].events() if event["ev"] == "failover"]
    return sum(swap["from"] == node_id for event in failovers for swap in event["swaps"])


def test_a_room_serves_as_soon_as_somebody_joins() -> None:
    with LocalRoom(rooms.MODEL) as room:
        room.add("n1", "--layers", "0..15", *FLAGS)
        with room.client("n1") as client:
            until(lambda: (tried(lambda: client.get("/status")) or {}).get("state") == "ready", "n1 is ready")
            with pytest.raises(RequestFailed) as failure:
                client.post("/chain", {"prompt": PROMPT})
            assert failure.value.error["missing"] == [[15, 30]]
            room.add("n2", "--layers", "15..30", *FLAGS)
            answer = until(
                lambda: tried(lambda: client.post("/chain", {"prompt": PROMPT, "max_tokens": 4})), "an answer"
            )
            ready = next(event for event in room.nodes["n2"].events() if event["ev"] == "ready")
            assert time.time() - ready["t"] < 5.0  # a heartbeat and a probe; this machine is not to be trusted with it
        assert answer["tokens"] == expected(PROMPT, 4)
