"""A replica that failed is missed for a while, but never so that nobody is left; a dead one is not tried for ever.

That a room without any replica says so at once, and serves within a second of one's return, is tests/room/test_no_replica.py.
"""

from __future__ import annotations

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import PATIENCE_S, PROMPT, expected, streamed

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
        client.post("/chain", {"prompt": PROMPT, "route": ["n1", "n2"]})
        four_halves.kill("n2")
        before = len(failovers(four_halves))
        for number in range(100):
            assert client.post("/chain", {"prompt": f"question {number}"})["tokens"] == expected(
                f"question {number}", 1
            )
    assert len(failovers(four_halves)) - before <= 3


def failovers(room: LocalRoom) -> list[object]:
    return [event for event in room.nodes["e0"].events() if event["ev"] == "failover"]
