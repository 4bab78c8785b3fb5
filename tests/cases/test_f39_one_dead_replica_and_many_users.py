"""A replica's death must not take anybody's answer with it: eight streams run, all of them end as if nothing had been."""

from __future__ import annotations

import threading

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import expected, streamed

pytestmark = pytest.mark.daemon
STREAMS = 8
TOKENS = 48


def test_all_answers_are_completed(four_halves: LocalRoom) -> None:
    answers: dict[int, list[int]] = {}
    running = threading.Barrier(STREAMS + 1)
    entry = four_halves.nodes["e0"].process

    def ask(number: int) -> None:
        with four_halves.client("e0") as client:
            seen = streamed(
                client,
                strike=lambda _names: (running.wait(60), None)[1],
                hops=(0,),
                after=2,
                prompt=f"stream {number}",
                max_tokens=TOKENS,
            )
        answers[number] = seen.tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    running.wait(60)
    four_halves.kill("n2")
    for thread in threads:
        thread.join(60)
    assert answers == {number: expected(f"stream {number}", TOKENS) for number in range(STREAMS)}
    assert four_halves.nodes["e0"].process is entry
    assert four_halves.nodes["e0"].alive
