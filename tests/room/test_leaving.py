"""Nodes that are told to stop: what runs is finished, and the others are told."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from meshd.cli.local_room import LocalRoom
from tests import rooms
from tests.rooms import PROMPT, ended, expected, meshd, noise, streamed, until

pytestmark = pytest.mark.daemon


@pytest.fixture
def pair() -> Iterator[LocalRoom]:
    """n1 holds all layers, n2 too, e0 none."""
    with LocalRoom(rooms.MODEL) as room:
        for name in ("n1", "n2"):
            room.add(name, "--layers", "0..30", *rooms.FLAGS)
        room.add("e0", "--capacity-mb", "0")
        room.wait(replicas=2, timeout_s=rooms.PATIENCE_S)
        yield room


def test_a_node_that_is_told_to_stop_finishes_and_says_goodbye(pair: LocalRoom) -> None:
    running = threading.Event()
    answers: list[rooms.Streamed] = []

    def ask() -> None:
        with pair.client("n1") as client:
            answers.append(streamed(client, strike=lambda _names: running.set(), hops=(0,), after=3, max_tokens=200))

    thread = threading.Thread(target=ask)
    thread.start()
    assert running.wait(rooms.PATIENCE_S)
    assert ended(pair, "n1") == 0
    thread.join(rooms.PATIENCE_S)
    assert answers[0].tokens == expected(PROMPT, 200)
    assert not noise(pair, "n1")
    for name in ("n2", "e0"):
        with pair.client(name) as client:
            states = {peer["name"]: peer["state"] for peer in client.get("/mesh/peers")["peers"]}
            assert states["n1"] == "left"  # it was told, it did not have to find out
            assert client.get("/mesh/hive")["stages"] == [[0, 30, 1]]


def test_a_second_signal_ends_it_at_once(pair: LocalRoom) -> None:
    with pair.client("n2", timeout_s=rooms.PATIENCE_S) as client:
        pieces = client.stream(PROMPT, max_tokens=4000)
        while not next(pieces).tokens:
            pass
        pair.signal("n2", signal.SIGTERM)
        until(lambda: any(event["ev"] == "leaving" for event in pair.nodes["n2"].events()), "it says that it leaves")
        assert pair.nodes["n2"].alive  # 4000 tokens are not over yet
        assert ended(pair, "n2", signal.SIGINT) == 0
        pieces.close()


def test_an_idle_node_ends_at_the_first_signal(pair: LocalRoom) -> None:
    assert ended(pair, "e0", signal.SIGINT) == 0
    assert not noise(pair, "e0")


def test_a_drained_node_hands_over_and_comes_back(four_halves: LocalRoom) -> None:
    drained: list[subprocess.CompletedProcess[str]] = []

    def drain(names: list[str]) -> None:
        drained.append(meshd("drain", "--timeout", "60", MESHD_URL=four_halves.nodes[names[0]].url))

    with four_halves.client("e0") as client:
        seen = streamed(client, strike=drain, hops=(1,), after=5, max_tokens=400)
        (name,) = seen.struck
        assert seen.tokens == expected(PROMPT, 400)
        assert not [lost for lost in seen.final["recoveries"] if lost["reason"] != "drain"]
        assert seen.final["route"][1]["name"] != name
        assert (drained[0].returncode, drained[0].stderr) == (0, "")
        for _ in range(4):
            answer = client.post("/chain", {"prompt": PROMPT})
            assert name not in [hop["name"] for hop in answer["route"]]
        with four_halves.client(name) as there:
            assert there.get("/status")["state"] == "draining"
        assert meshd("resume", MESHD_URL=four_halves.nodes[name].url).returncode == 0
        four_halves.wait(replicas=2, timeout_s=rooms.PATIENCE_S)
        assert client.post("/chain", {"prompt": PROMPT, "route": ["n1", name]})["tokens"] == expected(PROMPT, 1)


def test_a_drain_ends_although_clients_keep_coming(four_halves: LocalRoom) -> None:
    """What the node passes on to others is not its own work."""
    over = threading.Event()
    answers: list[rooms.Streamed] = []

    def ask() -> None:
        with four_halves.client("n1") as client:
            while not over.is_set():
                answers.append(streamed(client, max_tokens=16))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: answers, "the load runs")
        drained = meshd("drain", "--timeout", "60", MESHD_URL=four_halves.nodes["n1"].url)
        asked = len(answers)
        until(lambda: len(answers) > asked + 3, "the drained node still passes on")
    finally:
        over.set()
        for thread in threads:
            thread.join(rooms.PATIENCE_S)
        meshd("resume", MESHD_URL=four_halves.nodes["n1"].url)
    assert (drained.returncode, drained.stdout) == (0, "drained\n")
    assert all(answer.tokens == expected(PROMPT, 16) for answer in answers)
