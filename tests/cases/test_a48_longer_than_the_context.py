"""A prompt beyond the context is refused before any hop; one just below it is answered to the context's end."""

from __future__ import annotations

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.client import RequestFailed
from tests.rooms import expected

pytestmark = pytest.mark.daemon
CONTEXT = 8192


def test_beyond_at_and_below_the_limit(four_halves: LocalRoom) -> None:
    with four_halves.client("e0") as client:
        before = routes(four_halves)
        for path, asked in (
            ("/chain", {"prompt": "x" * 9000}),
            ("/v1/completions", {"model": "hash:30", "prompt": "x" * 9000}),
            ("/v1/chat/completions", {"model": "hash:30", "messages": [{"role": "user", "content": "x" * 9000}]}),
        ):
            with pytest.raises(RequestFailed) as failure:
                client.post(path, asked)
            assert (failure.value.http_status, failure.value.error["code"]) == (400, "context_length_exceeded")
        assert routes(four_halves) == before
        prompt = "y" * (CONTEXT - 2)
        answer = client.post("/chain", {"prompt": prompt, "max_tokens": 100})
    assert answer["finish_reason"] == "length"
    assert answer["tokens"] == expected(prompt, 2)
    assert answer["usage"]["prompt_tokens"] == CONTEXT - 2


def routes(room: LocalRoom) -> int:
    """How many requests were given a route."""
    return sum(event["ev"] == "route" for event in room.nodes["e0"].events())
