"""The whole room in one document, Prometheus' discovery, and the dashboard's files."""

from __future__ import annotations

import re
from dataclasses import replace
from email.utils import parsedate_to_datetime
from importlib.resources import files

import httpx
import trio
import trio.testing

from meshd.api import views
from meshd.api.app import App
from meshd.api.guards import Access, ApiKey, Guards, Right
from meshd.api.room_view import FRESH_S, RoomView, targets
from meshd.directory import Directory
from meshd.vocabulary import Endpoint, NodeId, NodeStatus
from tests.api.rig import TWO, Rig, client, member
from tests.fakes.chain import N1, N2

KEY = "k" * 32
KEYED = Guards(Access((ApiKey.of(KEY, Right.READ),), trust_loopback=False))
ALL_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def routes(rig: Rig) -> list[tuple[str, str]]:
    return [(route.method, route.path) for route in App(rig.node()).routes]


def test_the_room_in_one_document_is_what_its_parts_are() -> None:
    rig = Rig()
    rig.log.emit("join", node=N2)
    with client(rig) as http:
        room = http.get("/mesh/room", params={"events": "1"}).json()
        assert "events" not in http.get("/mesh/room").json()
        for key, path in (("peers", "/mesh/peers"), ("hive", "/mesh/hive"), ("routing", "/v1/routing")):
            assert room[key] == http.get(path).json()
        assert room["status"].keys() == http.get("/status").json().keys()
    assert [event["ev"] for event in room["events"]] == ["join"]
    assert {finding["code"] for finding in room["findings"]} >= {"single_replica"}
    assert room["what_if"] == [{"name": "n1", "layers": [[0, 15]]}, {"name": "n2", "layers": [[15, 30]]}]


def test_many_dashboards_cost_one_document() -> None:
    asked = 0
    rig = Rig()

    def directory() -> Directory:
        nonlocal asked
        asked += 1
        return TWO

    async def look() -> None:
        view = RoomView(replace(rig.node(), directory=directory), lambda: 0)
        bodies = {view.body(events=True) for _ in range(10)}
        assert (len(bodies), asked) == (1, 1)
        await trio.sleep(FRESH_S)
        view.body(events=True)
        assert asked == 2

    trio.run(look, clock=trio.testing.MockClock(autojump_threshold=0))


def test_targets_are_all_nodes_that_did_not_leave() -> None:
    n3, n4 = NodeId("3" * 32), NodeId("4" * 32)
    rig = Rig(
        directory=Directory(N1).replace(
            [
                member(N1, "n1", (0, 15)),
                member(N2, "n2", (15, 30), state=NodeStatus.DEAD, http=Endpoint("0.0.0.0", 8090)),
                member(n3, "n3", None, state=NodeStatus.LEFT),
                member(n4, "n1", None, http=None),
            ]
        )
    )
    with client(rig) as http:
        answer = http.get("/mesh/targets")
    assert answer.headers["content-type"] == "application/json"
    found = {entry["targets"][0]: entry["labels"] for entry in answer.json()}
    assert found.keys() == {"10.0.0.1:8090"}
    assert len(answer.json()) == 2  # both are reached at that address: n2 listens everywhere
    labels = answer.json()[1]["labels"]
    assert (labels["node"], labels["__meta_meshd_state"]) == ("n2", "dead")
    assert all(isinstance(value, str) for entry in answer.json() for value in entry["labels"].values())


def test_where_http_is_reached() -> None:
    listening = member(N1, "n1", None, http=Endpoint("0.0.0.0", 9000), addresses=(Endpoint("10.0.0.7", 1),))
    assert views.http_of(listening) == Endpoint("10.0.0.7", 9000)
    assert views.http_of(replace(listening, source=Endpoint("10.9.9.9", 5))) == Endpoint("10.9.9.9", 9000)
    assert views.http_of(member(N1, "n1", None, http=Endpoint("::", 9000), addresses=())) is None
    assert views.peer_json(listening, Directory(N1, {N1: listening}))["http"] == "http://10.0.0.7:9000"
    assert targets([member(N1, "n1", None, http=None)], lambda _: "n1") == []


def test_healthz_tells_the_time() -> None:
    with client(Rig()) as http:
        date = parsedate_to_datetime(http.get("/healthz").headers["date"])
    assert date.year >= 2024


# --- the dashboard's files --------------------------------------------------------------------------------------------


def shipped() -> dict[str, str]:
    folder = files("meshd.api").joinpath("dashboard")
    return {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}


def test_the_dashboard_loads_without_a_key_and_shows_nothing_of_the_room() -> None:
    rig = Rig()
    with client(rig, guards=KEYED) as http:
        for name in shipped():
            path = "/" if name == "index.html" else f"/dashboard/{name}"
            answer = http.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            assert rig.directory.self_id not in answer.text
        for path in ("/mesh/room", "/mesh/targets", "/events", "/metrics"):
            assert http.get(path).status_code == 401, path
        assert http.get("/mesh/room", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        assert http.get("/dashboard/").status_code == http.get("/dashboard/..%2fapp.py").status_code == 404


def test_the_dashboard_asks_nobody_else_and_writes_no_markup() -> None:
    for name, text in shipped().items():
        outside = [url for url in re.findall(r"(?:https?:)?//[a-z0-9.-]+", text) if "www.w3.org" not in url]
        assert name.endswith(".js") or not outside, (name, outside)
        assert not [url for url in outside if url.startswith("http")], (name, outside)
        if name.endswith(".js"):
            for way in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "Function(",
                "DOMParser",
            ):
                assert way not in text, (name, way)
    page = shipped()["index.html"]
    assert not re.search(r"\son[a-z]+=|javascript:|\sstyle=|<style|<script(?! type=\"module\" src=\"/dashboard/)", page)


# --- web pages of others ----------------------------------------------------------------------------------------------


def foreign(http: httpx.Client, headers: dict[str, str]) -> None:
    for _, path in routes(Rig()):
        for method in ALL_METHODS:
            answer = http.request(method, path, headers=headers)
            assert answer.status_code == 403, (method, path, answer.status_code)


def test_a_foreign_host_is_refused_on_every_route_and_method() -> None:
    with client(Rig()) as http:
        foreign(http, {"Host": "evil.example"})


def test_a_foreign_origin_is_refused_on_every_route_and_method() -> None:
    with client(Rig()) as http:
        foreign(http, {"Origin": "http://evil.example"})
        foreign(http, {"Origin": "null"})


def test_the_table_is_what_is_documented() -> None:
    paths = {path for _, path in routes(Rig())}
    assert {"/", "/mesh/peers", "/mesh/hive", "/mesh/targets", "/metrics", "/events", "/chain", "/admin/drain"} <= paths
