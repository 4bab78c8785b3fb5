"""A replica dies in the middle of an answer; its replacement must go on from there, not from position 0.

Killed in prefill and after 1, 2, 20 and 63 of 64 tokens: the ids are those of an undisturbed room, in one stream.
"""

from __future__ import annotations

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import PROMPT, expected, streamed

pytestmark = pytest.mark.daemon


@pytest.mark.parametrize("after", [0, 1, 2, 20, 63])
def test_the_answer_is_the_undisturbed_one(four_halves: LocalRoom, after: int) -> None:
    def kill(names: list[str]) -> None:
        for name in names:
            four_halves.kill(name)

    with four_halves.client("e0") as client:
        before = client.get("/status")["counters"]
        seen = streamed(client, strike=kill, hops=(1,), after=after)
        counters = client.get("/status")["counters"]
    assert seen.tokens == expected(PROMPT, 64)
    assert seen.text == bytes(seen.tokens).decode()
    assert seen.final["finish_reason"] == "length"
    assert seen.final["usage"]["completion_tokens"] == 64
    if after < 63:  # the last token may have been under way
        (lost,) = seen.final["recoveries"]
        assert (lost["from"], lost["layers"], lost["exact"]) == (seen.struck[0], [15, 30], True)
        assert counters["recoveries"] == before.get("recoveries", 0) + 1
        assert counters["replayed_tokens"] > before.get("replayed_tokens", 0)
