from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshd.api import views
from meshd.api.node import NodeFacts
from meshd.directory import Directory, Member
from meshd.vocabulary import Endpoint, Health, LayerRange, Loading, NodeId, NodeStatus
from tests.api.rig import SPEC, Rig, client, member

READY = NodeFacts(state="ready", name="n1")
PEER = [
    *[
        "node_id",
        "name",
        "state",
        "role",
        "model",
        "digest",
        "dtype",
        "arith",
        "layers",
        "generation",
        "loading",
        "mesh",
    ],
    *["http", "epoch", "incarnation", "version", "wire", "incompatible", "last_heard_s", "admitted", "admission"],
    *["one_way", "rtt_ms", "capacity_mb", "layer_ms", "claim_ratio", "via", "status"],
]
STATUS = [
    *["ram_free_mb", "ram_total_mb", "load1", "in_flight", "queue_depth", "tokens_per_s", "kv_used_mb", "kv_total_mb"],
    *["battery_pct", "on_ac", "temp_c", "jammed"],
]


def node(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def room(*members: Member) -> Directory:
    return Directory(node(1)).replace(members)


def hive(*members: Member, facts: NodeFacts = READY) -> dict[str, Any]:
    return views.hive_json(room(*members), facts, SPEC)


def test_a_room_with_one_replica_at_the_end() -> None:
    told = hive(
        member(node(1), "n1", (0, 15)),
        member(node(2), "n2", (0, 15)),
        member(node(4), "n4", (15, 30)),
    )
    assert told["stages"] == [[0, 15, 2], [15, 30, 1]]
    assert told["covered"] == [[0, 30]]
    assert told["single"] == [[15, 30, "n4"]]
    assert (told["missing"], told["min_replicas"], told["nodes"]) == ([], 1, 3)
    assert told["status"] == "healthy (no redundancy)"
    assert (told["model"], told["digest"], told["num_layers"]) == ("tiny", "d1", 30)
    assert told["entries"] == ["n1", "n2", "n4"]


def test_a_room_with_a_gap_says_which() -> None:
    told = hive(member(node(1), "n1", (0, 15)), member(node(2), "n2", (20, 25)))
    assert told["missing"] == [[15, 20], [25, 30]]
    assert told["status"] == "broken: layers 15..20, 25..30 missing"
    assert told["min_replicas"] == 0


def test_two_of_everything_is_healthy() -> None:
    told = hive(member(node(1), "n1", (0, 30)), member(node(2), "n2", (0, 15)), member(node(3), "n3", (15, 30)))
    assert told["status"] == "healthy"
    assert told["min_replicas"] == 2


def test_nothing_at_all_is_no_model() -> None:
    told = views.hive_json(Directory(node(1)), NodeFacts(), None)
    assert (told["status"], told["model"], told["stages"]) == ("no model", None, [])


@pytest.mark.parametrize(
    "other",
    [
        member(node(2), "n2", (15, 30), state=NodeStatus.SUSPECT),
        member(node(2), "n2", (15, 30), state=NodeStatus.DEAD),
        member(node(2), "n2", (15, 30), state=NodeStatus.LEFT),
        member(node(2), "n2", (15, 30), state=NodeStatus.DRAINING),
        member(node(2), "n2", (15, 30), draining=True),
        member(node(2), "n2", (15, 30), admitted=None),
        member(node(2), "n2", (15, 30), admitted=False),
        member(node(2), "n2", (15, 30), digest="d2"),
        replace(member(node(2), "n2", (15, 30)), incompatible="wire 9"),
        member(node(2), "n2", None),
    ],
)
def test_who_is_not_counted(other: Member) -> None:
    told = hive(member(node(1), "n1", (0, 15)), other)
    assert told["stages"] == [[0, 15, 1]]
    assert told["missing"] == [[15, 30]]


@pytest.mark.parametrize("state", ["starting", "loading", "proving", "draining", "failed"])
def test_this_node_counts_only_when_ready(state: str) -> None:
    me, other = member(node(1), "n1", (0, 30), admitted=None), member(node(2), "n2", (0, 30))
    assert hive(me, other, facts=NodeFacts(state=state))["stages"] == [[0, 30, 1]]
    assert hive(me, other)["stages"] == [[0, 30, 2]]


def test_what_else_a_hive_tells() -> None:
    told = hive(
        member(node(1), "pi", (0, 30)),
        replace(member(node(2), "pi", (0, 30)), health=Health(jammed=True)),
        member(node(3), "n3", None, loading=Loading(LayerRange(0, 15), "fetching", 0.25)),
        replace(member(node(4), "n4", (0, 15), admitted=False), admission="residual off by 12 %"),
        member(node(5), "n5", (0, 15), admitted=None, entry=False),
        member(node(6), "n6", (0, 4), digest="d2", model="big", num_layers=4),
        member(node(7), "n7", (0, 4), digest="d2", model="big", state=NodeStatus.DEAD),
    )
    assert told["jammed"] == ["pi~0000"]
    assert told["loading"] == [{"name": "n3", "layers": [0, 15], "progress": 0.25}]
    assert told["not_admitted"] == [
        {"name": "n4", "reason": "residual off by 12 %"},
        {"name": "n5", "reason": "not probed yet"},
    ]
    assert told["others"] == [{"model": "big", "digest": "d2", "nodes": 1}]
    assert "n5" not in told["entries"]
    assert told["nodes"] == 5


def test_an_observer_sees_the_model_that_most_serve() -> None:
    me = member(node(1), "n1", None, digest="", model="")
    told = views.hive_json(room(me, member(node(2), "n2", (0, 30)), member(node(3), "n3", (0, 30))), READY, None)
    assert (told["model"], told["status"]) == ("tiny", "healthy")


@pytest.mark.parametrize(
    ("layers", "role"),
    [((0, 15), "entry"), ((15, 30), "tail"), ((5, 9), "middle"), ((0, 30), "lane"), (None, "observer")],
)
def test_roles(layers: tuple[int, int] | None, role: str) -> None:
    assert views.role_of(member(node(1), "n1", layers).advert) == role


def test_a_peer_object_has_every_field() -> None:
    me = member(node(1), "n1", (0, 15), loading=Loading(LayerRange(0, 30), "claimed", 0.0))
    peer = replace(member(node(2), "n2", None, addresses=()), source=Endpoint("::1", 7001), rtt_ms=0.12345)
    told = views.peers_json(room(me, peer))
    assert set(told["self"]) >= set(PEER)
    assert set(told["self"]["status"]) == set(STATUS)
    assert told["self"]["loading"] == {"layers": [0, 30], "stage": "claimed", "progress": 0.0}
    assert told["self"]["mesh"] == "10.0.0.1:8091"
    (other,) = told["peers"]
    assert (other["mesh"], other["layers"], other["loading"], other["rtt_ms"]) == ("[::1]:7001", None, None, 0.123)
    assert other["state"] == "alive"


def test_the_documents_over_http() -> None:
    rig = Rig()
    with client(rig) as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        assert http.get("/readyz").status_code == 200
        assert http.get("/mesh/hive").json()["status"] == "healthy (no redundancy)"
        assert http.get("/mesh/peers").json()["peers"][0]["name"] == "n2"
        assert http.get("/mesh/model").json()["hidden_size"] == 4
        status = http.get("/status").json()
        arms = http.get("/v1/routing", params={"model": "m"}).json()["models"]
        assert arms == {"m": {"epoch": 0, "candidates": []}}
        assert http.get("/metrics").headers["content-type"].startswith("text/plain")
        rig.directory = room(member(node(1), "n1", (0, 15)))
        gone = http.get("/readyz")
        rig.directory, rig.spec = room(), None
        empty = http.get("/readyz")
        assert http.get("/mesh/model").status_code == 503
        assert http.get("/v1/models").json()["data"] == []
    assert set(status) >= set(STATUS) | {"node_id", "name", "model", "layers", "state", "reason", "version", "uptime_s"}
    assert set(status["counters"]) >= {"recoveries", "replayed_tokens", "hedges", "rejected_datagrams"}
    assert (gone.status_code, gone.json()["missing"], gone.json()["error"]["missing"]) == (503, [[15, 30]], [[15, 30]])
    assert (empty.status_code, empty.json()["error"]["code"]) == (503, "not_ready")
    assert (empty.json()["status"], empty.json()["missing"]) == ("no model", [])
    assert gone.headers["retry-after"] == empty.headers["retry-after"] == "1"
