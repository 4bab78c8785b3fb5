"""A replica that takes seconds for a step is neither dead nor in everybody's way.

n2 takes 4 s for each forward, n3 its 5 ms. What is not told to go through n2 goes through n3; what is, ends late, or by its
own deadline under its own name; and n2 is asked again afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.client import RequestFailed
from tests import rooms
from tests.rooms import FLAGS, PROMPT, expected, streamed

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def uneven() -> Iterator[LocalRoom]:
    with LocalRoom(rooms.MODEL) as room:
        # Sixteen steps prove a shard, a minute of them for n2: that is admission's patience, not this case's.
        flags = (*FLAGS, "--no-admit")
        room.add("n1", "--layers", "0..15", "--route-explore-share", "0", *flags)
        room.add("n2", "--layers", "15..30", *flags, "--model", "hash:30,step_ms=8000,layer_mb=1")
        room.add("n3", "--layers", "15..30", *flags)
        room.wait(at=["n1"], nodes=3, timeout_s=rooms.PATIENCE_S)
        yield room


def test_others_go_on_while_one_waits(uneven: LocalRoom) -> None:
    late: list[dict[str, object]] = []

    def through_the_slow_one() -> None:
        with uneven.client("n1") as client:
            late.append(client.post("/chain", {"prompt": PROMPT, "max_tokens": 1, "route": ["n1", "n2"]}))

    thread = threading.Thread(target=through_the_slow_one)
    thread.start()
    with uneven.client("n1") as client:
        for _ in range(4):
            seen = streamed(client, max_tokens=4)
            assert seen.tokens == expected(PROMPT, 4)
            assert [hop["name"] for hop in seen.final["route"]] == ["n1", "n3"]
    assert not late  # they did not wait for it
    thread.join(rooms.PATIENCE_S)
    assert late[0]["tokens"] == expected(PROMPT, 1)


def test_a_deadline_is_named_and_a_slow_node_is_not_banned(uneven: LocalRoom) -> None:
    with uneven.client("n1") as client:
        with pytest.raises(RequestFailed) as failure:
            client.post("/chain", {"prompt": "again", "route": ["n1", "n2"], "deadline_ms": 500})
        assert (failure.value.http_status, failure.value.error["code"]) == (504, "deadline_exceeded")
        answer = client.post("/chain", {"prompt": PROMPT, "max_tokens": 1, "route": ["n1", "n2"]})
        assert answer["tokens"] == expected(PROMPT, 1)
        states = {peer["name"]: peer["state"] for peer in client.get("/mesh/peers")["peers"]}
        assert states == {"n2": "alive", "n3": "alive"}


def test_with_nobody_faster_it_is_waited_for(uneven: LocalRoom) -> None:
    uneven.kill("n3")
    with uneven.client("n1", timeout_s=rooms.PATIENCE_S) as client:
        answer = client.post("/chain", {"prompt": PROMPT, "max_tokens": 1})
    assert answer["tokens"] == expected(PROMPT, 1)
    assert [hop["name"] for hop in answer["route"]] == ["n1", "n2"]
