"""IPv6 addresses are taken, printed in brackets, and make a room like any other."""

from __future__ import annotations

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.vocabulary import Endpoint
from tests import rooms
from tests.rooms import FLAGS, PATIENCE_S, PROMPT, expected

pytestmark = pytest.mark.daemon


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host", "host:8091"),
        ("host:7002", "host:7002"),
        ("::1", "[::1]:8091"),
        ("[::1]:7002", "[::1]:7002"),
        ("[::1]", "[::1]:8091"),
    ],
)
def test_peers_may_be_written_in_any_of_these_ways(text: str, shown: str) -> None:
    assert str(Endpoint.parse(text, 8091)) == shown


@pytest.mark.parametrize("text", ["::1:7002:x", "[::1", "[::1]7002", "host:port", "host:70000", "[no]:1"])
def test_anything_else_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        Endpoint.parse(text, 8091)
    assert text in str(refusal.value)


def test_a_room_over_the_v6_loopback() -> None:
    with LocalRoom(rooms.MODEL, host="::1") as room:
        room.add("n1", "--layers", "0..15", *FLAGS)
        room.add("n2", "--layers", "15..30", *FLAGS)
        room.wait(nodes=2, timeout_s=PATIENCE_S)
        with room.client("n1") as client:
            answer = client.post("/chain", {"prompt": PROMPT, "max_tokens": 4})
            (peer,) = client.get("/mesh/peers")["peers"]
        ready = next(event for event in room.nodes["n1"].events() if event["ev"] == "ready")
    assert answer["tokens"] == expected(PROMPT, 4)
    assert peer["mesh"] == room.nodes["n2"].mesh
    assert peer["http"].endswith(room.nodes["n2"].http)
    assert ready["http"] == f"http://{room.nodes['n1'].http}"
    assert ready["http"].startswith("http://[::1]:")
