"""A device that restarts, or comes back under another address, is the same device: one id, one entry in every list, one history.

A fresh identity at each start left ghosts that were counted and dialled; an address that differed was taken for a conflict.
The same schedules with many seeds, without processes: tests/gossip/test_rooms.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshd.cli.local_room import LocalRoom, free_ports
from meshd.client import Client
from tests.rooms import PATIENCE_S, until

pytestmark = pytest.mark.daemon

LAYERS = 4
FLAGS = ("--capacity-mb", "100")


@pytest.fixture(scope="module")
def three() -> Iterator[LocalRoom]:
    with LocalRoom(f"hash:{LAYERS},layer_mb=1", common=FLAGS) as room:
        for name, layers in (("n1", "0..2"), ("n2", "2..4"), ("n3", "2..4")):
            room.add(name, "--layers", layers)
        room.wait(nodes=3, timeout_s=PATIENCE_S)
        yield room


def peer(client: Client, name: str) -> Any:
    """The only peer of this name."""
    (found,) = [peer for peer in client.get("/mesh/peers")["peers"] if peer["name"] == name]
    return found


def test_d05_restarts_leave_one_device_with_its_history(three: LocalRoom) -> None:
    with three.client("n1") as client:
        assert client.ask("a history", route=["n1", "n2"], max_tokens=32)["routing"]["mode"] == "pinned"
        before = peer(client, "n2")
        for epoch in range(before["epoch"] + 1, before["epoch"] + 6):
            three.kill("n2")
            three.start("n2")
            until(lambda epoch=epoch: peer(client, "n2")["epoch"] == epoch, "the new run")  # type: ignore[misc]  # bound above
            assert client.get("/mesh/hive")["nodes"] <= 3
        until(lambda: peer(client, "n2")["admitted"], "n2 proven again")
        assert peer(client, "n2")["node_id"] == before["node_id"]
        assert len(client.get("/mesh/peers")["peers"]) == 2
        (model,) = client.get("/v1/routing")["models"].values()
        arms = {arm["signature"].partition("|")[2]: arm for arm in model["candidates"]}
        assert arms["n1[0:2]->n2[2:4]"]["samples"] == 1
        assert arms["n1[0:2]->n2[2:4]"]["tps"] > 0


def test_m14_the_proven_key_counts_and_not_the_address(three: LocalRoom) -> None:
    node = three.nodes["n2"]
    old = node.mesh
    with three.client("n1") as client:
        before = peer(client, "n2")
        three.kill("n2")
        http, mesh = free_ports("127.0.0.22", 2)
        node.http, node.mesh = f"127.0.0.22:{http}", f"127.0.0.22:{mesh}"
        three.start("n2")
        moved = until(
            lambda: next(iter([p] if (p := peer(client, "n2"))["mesh"] == node.mesh else []), None), "the move"
        )
        assert (moved["node_id"], moved["state"]) == (before["node_id"], "alive")
        until(lambda: peer(client, "n2")["admitted"], "n2 proven at its new address")
        answer = client.ask("where are you now", route=["n1", "n2"], max_tokens=4)
        assert [hop["name"] for hop in answer["route"]] == ["n1", "n2"]
        assert peer(client, "n2")["mesh"] != old
    assert not [event for event in three.nodes["n1"].events() if event["ev"] == "conflict"]
