"""A stream whose stage is lost for good ends with one error event: no [DONE], no finish_reason, no half a frame.

Success and bad requests are tests/api/test_openai.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from meshd.cli.local_room import LocalRoom
from tests import rooms
from tests.rooms import FLAGS, PATIENCE_S, PROMPT, expected

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def bare() -> Iterator[LocalRoom]:
    """One replica of each half."""
    with LocalRoom(rooms.MODEL) as room:
        room.add("n1", "--layers", "0..15", *FLAGS)
        room.add("n2", "--layers", "15..30", *FLAGS)
        room.wait(timeout_s=PATIENCE_S)
        yield room


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stage_that_is_lost_for_good(bare: LocalRoom, path: str) -> None:
    asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {"model": "hash:30", "max_tokens": 500, "temperature": 0, "stream": True, **asked}
    rooms.whole(bare, replicas=1)
    raw = b""
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", bare.nodes["n1"].url + path, json=body) as response,
    ):
        for part in response.iter_raw():
            raw += part
            if raw.count(b"data: ") > 4 and bare.nodes["n2"].alive:
                bare.kill("n2")
    frames = raw.decode().split("\n\n")
    assert frames.pop() == ""  # every event is closed
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames]  # ... and is one line of JSON
    *pieces, last = events
    assert last["error"]["code"] == "stage_unavailable"
    assert b"[DONE]" not in raw
    assert not any("error" in piece for piece in pieces)
    assert {choice["finish_reason"] for piece in pieces for choice in piece["choices"]} == {None}
    if path == "/v1/completions":
        text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
        assert 3 <= len(text) < 500
        assert text == bytes(expected(PROMPT, len(text))).decode()
