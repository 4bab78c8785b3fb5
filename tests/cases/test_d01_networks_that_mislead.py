"""Hosts whose network misleads them at the start: an interface that is down, packets lost in one direction, a tunnel that looks
like the way out.

An address that failed once was never tried again; a node that hears but is not heard was listed by nobody; the address of the
default route was told to peers that cannot reach it. The same in parts and in the simulator: tests/gossip.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from meshd.cli.chaos.box import Box
from meshd.cli.chaos.netlab import NetLab, lacking, tool
from meshd.cli.local_room import LocalRoom, Node
from meshd.client import Client
from meshd.identity import mesh_key
from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.inference.hash_stage import reference
from tests.rooms import PATIENCE_S, tried, until

pytestmark = [
    pytest.mark.daemon,
    pytest.mark.netns,
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "has all it needs"),
]

LAYERS = 4
PROMPT = "is anybody there"
ANYWHERE = ("--http", "0.0.0.0:8090", "--mesh", "0.0.0.0:8091")


@contextmanager
def hosts(count: int) -> Iterator[Box]:
    """Empty hosts on a switch, and one more for the clients."""
    with NetLab(count + 1) as net, LocalRoom(f"hash:{LAYERS},layer_mb=1", common=("--capacity-mb", "100")) as room:
        ring = KeyRing((MeshKey.generate(),))
        mesh_key.save(room.home / "mesh.key", ring)
        room.key = ring.api_key()
        yield Box(room, net)


def ip(box: Box, host: int, *lines: str) -> None:
    tool("ip", "-n", box.net.namespace(host), "-batch", "-", text="".join(f"{line}\n" for line in lines))


def ready(node: Node) -> bool:
    return any(event["ev"] == "ready" for event in node.events())


def peer(client: Client, name: str) -> Any:
    """How the client's entry sees a node; None while it does not."""
    peers = (tried(lambda: client.get("/mesh/peers")) or {"peers": []})["peers"]
    return next((peer for peer in peers if peer["name"] == name), None)


def test_d01_d07_an_interface_that_is_down_and_a_tunnel_that_is_up() -> None:
    with hosts(2) as box:
        ip(box, 0, "link add tun9 type veth peer name far9", "link set far9 up", "link set tun9 up")
        ip(box, 0, "addr add 10.9.0.2/24 dev tun9", "route del default", "route add default via 10.9.0.1 dev tun9")
        ip(box, 1, "link set eth0 down")
        box.add("n1", "--layers", "0..2", *ANYWHERE)
        box.add("n2", "--layers", "2..4", *ANYWHERE)
        for node in box.room.nodes.values():  # neither waits for a network
            until(partial(ready, node), f"{node.name} is ready")
        ip(box, 1, "link set eth0 up")
        with box.inside():
            box.room.wait(nodes=2, timeout_s=PATIENCE_S)
            with box.room.client("n2") as client:
                assert peer(client, "n1")["mesh"] == "10.77.0.1:8091"
                assert peer(client, "n1")["http"] == "http://10.77.0.1:8090"
                tokens = client.ask(PROMPT, max_tokens=4)["tokens"]
        assert tokens == reference(tuple(PROMPT.encode()), 4, LAYERS)


def test_d03_who_is_heard_of_but_not_heard_gets_no_work() -> None:
    with hosts(3) as box:
        box.net.cut((0, 1))  # whatever n1 sends to n2 is lost
        for name, layers in (("n1", "0..2"), ("n2", "2..4"), ("n3", "2..4")):
            box.add(name, "--layers", layers)
        with box.inside():
            box.room.wait(nodes=3, timeout_s=PATIENCE_S, at=["n3"])
            with box.room.client("n2") as client:
                until(
                    lambda: (peer(client, "n1") or {}).get("one_way"),
                    "n2 knows n1 from n3, and that it does not hear it",
                )
                seen = peer(client, "n1")
                assert seen["last_heard_s"] is None
                assert seen["admitted"] is not True
            with box.room.client("n1") as client:
                until(lambda: tried(lambda: client.get("/readyz")), "n1 has a route")
                answer = client.ask(PROMPT, max_tokens=8)
        assert answer["tokens"] == reference(tuple(PROMPT.encode()), 8, LAYERS)
        assert [hop["name"] for hop in answer["route"]] == ["n1", "n3"]
