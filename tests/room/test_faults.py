"""Devices that hang or die under a running answer: a sample of what `python -m benchmarks kill` sweeps."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio

from meshd.cli.local_room import LocalRoom
from meshd.client import AsyncClient
from tests.rooms import PATIENCE_S, PROMPT, expected, idle, streamed, until

pytestmark = pytest.mark.daemon


@pytest.mark.parametrize(
    ("kind", "hops", "after"),
    [("freeze", (1,), 2), ("freeze", (0,), 20), ("kill", (0, 1), 20), ("freeze", (0, 1), 0), ("kill", (0,), 0)],
)
def test_not_one_token_changes(four_halves: LocalRoom, kind: str, hops: tuple[int, ...], after: int) -> None:
    def strike(names: list[str]) -> None:
        for name in names:
            (four_halves.kill if kind == "kill" else four_halves.freeze)(name)

    with four_halves.client("e0") as client:
        seen = streamed(client, strike=strike, hops=hops, after=after)
    assert seen.tokens == expected(PROMPT, 64)
    assert {lost["from"] for lost in seen.final["recoveries"]} >= set(seen.struck)
    assert all(lost["exact"] for lost in seen.final["recoveries"])
    assert not {hop["name"] for hop in seen.final["route"]} & set(seen.struck)


def test_a_thawed_node_leaves_nothing_behind(four_halves: LocalRoom) -> None:
    with four_halves.client("e0") as client:
        seen = streamed(client, strike=lambda names: four_halves.freeze(names[0]), hops=(1,), after=5)
        (frozen,) = seen.struck
        four_halves.thaw(frozen)
        four_halves.wait(replicas=2, timeout_s=PATIENCE_S)
        again = client.post("/chain", {"prompt": PROMPT, "max_tokens": 4, "route": ["n1", frozen]})
        assert again["tokens"] == expected(PROMPT, 4)
    # Sessions that its entry ended while it hung are forgotten by their own silence at the latest.
    until(lambda: not list(idle(four_halves)), "nothing runs and nothing is remembered")


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_an_answer_outlives_its_entry(four_halves: LocalRoom, kind: str) -> None:
    names = ("n2", "n3")

    def strike(_names: list[str]) -> None:
        (four_halves.kill if kind == "kill" else four_halves.freeze)(names[0])

    with four_halves.client(*names, timeout_s=5) as client:
        seen = streamed(client, strike=strike, hops=(0,), after=20)
    assert seen.tokens == expected(PROMPT, 64)
    assert seen.final["tokens"] == seen.tokens
    assert seen.text == seen.final["text"] == bytes(seen.tokens).decode()


def test_streams_in_tasks_outlive_their_entry(four_halves: LocalRoom) -> None:
    """Three at once of one asynchronous client, all at the entry that dies."""
    urls = [four_halves.nodes[name].url for name in ("n2", "n3")]
    prompts = [f"{i}: {PROMPT}" for i in range(3)]
    found: dict[str, list[int]] = {}

    async def stream(room: AsyncClient, prompt: str) -> None:
        tokens = found[prompt] = []
        async for piece in room.stream(prompt, max_tokens=48, patience_s=PATIENCE_S):
            tokens += piece.tokens
            if len(tokens) >= 12 and min(map(len, found.values())) > 0:
                four_halves.kill("n2")

    async def main() -> None:
        async with AsyncClient(urls, timeout_s=5) as room, trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(stream, room, prompt)

    trio.run(main)
    assert found == {prompt: expected(prompt, 48) for prompt in prompts}


def test_ask_goes_on_at_another_entry(four_halves: LocalRoom) -> None:
    urls = [flag for name in ("n1", "e0") for flag in ("--url", four_halves.nodes[name].url)]
    with subprocess.Popen(
        [sys.executable, "-m", "meshd", "ask", "--raw", "--max-tokens", "64", *urls, PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as ask:
        assert ask.stdout is not None
        assert ask.stderr is not None
        first = ask.stdout.read(5)
        four_halves.kill("n1")
        printed = first + ask.stdout.read()
        complaint = ask.stderr.read()
    assert (ask.returncode, complaint) == (0, b"")
    assert printed == bytes(expected(PROMPT, 64)) + b"\n"
