from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio

from meshd.api.app import App
from meshd.api.message import Request, Response, Writer, json_response
from meshd.api.node import NodeFacts
from meshd.directory import Directory
from meshd.errors import CallerError, NoOtherEntry, NotReady
from tests.api.rig import SPEC, TWO, Rig, client, member, raw_get
from tests.fakes.chain import N1, N2, FakeChain


class Passed:
    """Stands for the node that requests are passed on to."""

    def __init__(self) -> None:
        self.requests: list[tuple[Request, str]] = []
        self.deadlines_s: list[float | None] = []

    async def __call__(
        self, request: Request, writer: Writer, *, digest: str, deadline_s: float | None
    ) -> Response | None:
        self.requests.append((request, digest))
        self.deadlines_s.append(deadline_s)
        await writer.start(200, (("Content-Type", "application/json"),))
        await writer.send(b'{"passed":')
        await writer.send(b"true}")
        return None


@pytest.mark.parametrize("path", ["/chain", "/v1/chat/completions", "/v1/completions"])
def test_a_node_without_text_passes_requests_on(path: str) -> None:
    passed = Passed()
    rig = Rig(text=None, pass_on=passed)
    with client(rig) as http:
        assert http.post(path, json={"prompt": "hi"}).json() == {"passed": True}
        assert http.post(path, json={"prompt": "hi", "model": "tiny"}).json() == {"passed": True}
        unknown = http.post(path, json={"prompt": "hi", "model": "huge"})
    assert [(r.path, r.body, r.passed_on, d) for r, d in passed.requests] == [
        (path, b'{"prompt":"hi"}', True, ""),
        (path, b'{"prompt":"hi","model":"tiny"}', True, "d1"),
    ]
    assert passed.deadlines_s == [60.0 if path == "/chain" else None] * 2
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def _to_nobody(*_: Any, **__: Any) -> None:
    raise NoOtherEntry("no other")


@pytest.mark.parametrize("pass_on", [None, _to_nobody])
def test_without_anybody_to_pass_on_to_it_says_why_not(pass_on: Any) -> None:
    rig = Rig(text=None, facts=NodeFacts(state="loading", reason="fetching layers 0..15"), pass_on=pass_on)
    with client(rig) as http:
        answer = http.post("/chain", json={"prompt": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert "(loading: fetching layers 0..15)" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("admitted", [True, None])  # None: a shard of another model cannot be judged here
def test_another_model_of_the_room_is_asked_where_it_is(admitted: bool | None) -> None:
    passed = Passed()
    big = member(N2, "n2", (0, 4), digest="d2", model="org/big", num_layers=4, admitted=admitted)
    room = Directory(N1).replace([member(N1, "n1", (0, 30)), big])
    with client(Rig(directory=room, pass_on=passed)) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny", "org/big"]
        assert http.post("/v1/completions", json={"prompt": "hi", "model": "org/big"}).json() == {"passed": True}
    assert passed.requests[0][1] == "d2"


def test_another_model_of_shards_that_failed_is_not_listed() -> None:
    big = member(N2, "n2", (0, 4), digest="d2", model="org/big", num_layers=4, admitted=False)
    with client(Rig(directory=Directory(N1).replace([member(N1, "n1", (0, 30)), big]), pass_on=Passed())) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny"]


@pytest.mark.parametrize("path", ["/chain", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", ["org/big", "d2"])
def test_another_model_that_lacks_layers_is_unavailable_not_unknown(path: str, name: str) -> None:
    passed = Passed()
    half = member(N2, "n2", (0, 3), digest="d2", model="org/big", num_layers=4)
    room = Directory(N1).replace([member(N1, "n1", (0, 30)), half])
    with client(Rig(directory=room, pass_on=passed)) as http:
        assert [other["digest"] for other in http.get("/mesh/hive").json()["others"]] == ["d2"]
        answer = http.post(path, json={"prompt": "hi", "model": name})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["missing"]) == (503, "stage_unavailable", [[3, 4]])
    assert answer.headers["retry-after"] == "1"
    assert not passed.requests


def test_what_was_passed_on_is_answered_and_never_passed_on_again() -> None:
    class Collect:
        started = False

        async def start(self, status: int, headers: Any) -> None: ...

        async def send(self, data: bytes) -> None: ...

    async def main() -> None:
        rig = Rig(FakeChain(tuple(b"abc")))
        request = Request("POST", "/chain", body=b'{"prompt": "hi"}', tenant="t1")
        answer = await App(rig.node()).take_over(request, Collect())
        assert answer is not None
        assert b'"text":"a"' in answer.body
        assert rig.chain.requests[0].tenant == "t1"
        await App(rig.node()).take_over(replace(request, waited_s=58.5), Collect())
        await App(rig.node()).take_over(replace(request, waited_s=70.0), Collect())
        assert [asked.deadline_s for asked in rig.chain.requests] == [60.0, 1.5, 0.0]
        rig = Rig(text=None, pass_on=Passed())
        with pytest.raises(NotReady):
            await App(rig.node()).take_over(request, Collect())
        for path in ("/admin/drain", "/mesh/peers", "/nowhere"):
            with pytest.raises(CallerError):
                await App(rig.node()).take_over(replace(request, path=path), Collect())

    trio.run(main)


def test_requests_are_counted_while_they_run_whatever_ends_them() -> None:
    async def json_answer(
        request: Request, writer: Writer, *, digest: str, deadline_s: float | None
    ) -> Response | None:
        return json_response({})

    async def main() -> None:
        chain = FakeChain(tuple(b"abc"), hold_at=1)
        app = App(Rig(chain).node())
        request = Request("POST", "/chain", body=b'{"prompt": "hi", "max_tokens": 3}')

        class Sink:
            started = False

            async def start(self, status: int, headers: Any) -> None: ...

            async def send(self, data: bytes) -> None: ...

        async with trio.open_nursery() as nursery:
            nursery.start_soon(app.take_over, request, Sink())
            while not chain.running:
                await trio.sleep(0)
            assert app.in_flight == 1
            nursery.cancel_scope.cancel()
        assert (app.in_flight, chain.running) == (0, 0)
        with pytest.raises(CallerError):
            await app.take_over(replace(request, body=b"{}"), Sink())
        assert app.in_flight == 0

    trio.run(main)


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail",
    [
        *[
            "",
            ".",
            "..",
            "../..",
            "%2e%2e",
            "a/../../b",
            "/etc",
            "%2Fetc",
            "a%5Cb",
            "a%2f..%2fb",
            "a" * 300,
            "a%00b",
            "a/b/c",
        ],
        *["%252e%252e", "org%252Fname", "..%2fhealthz", "org/..", "org/.", "name@", "hash:0", "~", "a%20b", "%c3%a9"],
    ],
)
def test_o52_a_model_id_is_never_a_path(tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    rig = Rig()
    with client(rig) as http:
        monkeypatch.setattr("builtins.open", lambda *args, **_: opened.append(args))
        status, document = raw_get(http, f"/v1/models/{tail}")
        monkeypatch.undo()
    assert status == 404
    assert document["error"]["code"] in ("model_not_found", "not_found")
    assert opened == []


@pytest.mark.parametrize("spelling", ["org/name", "org%2Fname", "org%2fname", "%6frg/name"])
def test_o52_a_name_with_a_slash_is_served_and_listed(spelling: str) -> None:
    spec = replace(SPEC, name="org/name")
    with client(Rig(FakeChain(tuple(b"abc")), spec=spec)) as http:
        status, document = raw_get(http, f"/v1/models/{spelling}")
        assert (status, document["id"]) == (200, "org/name")
        assert http.get("/v1/models").json()["data"][0]["id"] == "org/name"
        asked = http.post("/v1/completions", json={"model": "org/name", "prompt": "hi"})
    assert asked.json()["model"] == "org/name"


@pytest.mark.parametrize("bad", ["..", ".", "a/../../b", "/etc", "a\\b", "a%2f..%2fb", "x" * 300, "a\x00b", "a\nb"])
def test_o52_in_a_body_too(bad: str) -> None:
    with client(Rig()) as http:
        answer = http.post("/v1/completions", json={"model": bad, "prompt": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_is_listed_only_while_all_its_layers_are_covered() -> None:
    rig = Rig()
    with client(rig) as http:
        rig.directory = TWO.replace([member(N1, "n1", (0, 15))])
        assert http.get("/v1/models").json()["data"] == []
        assert http.get("/v1/models/tiny").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/chain", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("POST", "/healthz", "GET, HEAD"),
        ("HEAD", "/events", "GET"),
        ("GET", "/admin/drain", "POST"),
        ("BREW", "/", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allow: str) -> None:
    with client(Rig()) as http:
        answer = http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)


def test_unknown_paths_and_encoded_known_ones() -> None:
    with client(Rig()) as http:
        for path in ("/nowhere", "/chain/", "/Healthz", "//healthz", "/mesh/../status", "/mesh/%2e%2e/status"):
            assert raw_get(http, path)[0] == 404, path
        assert raw_get(http, "/%68ealthz?x=1")[0] == 200
        assert http.head("/healthz").content == b""


def test_the_front_page_lists_what_there_is() -> None:
    with client(Rig()) as http:
        page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in ("/chain", "/v1/chat/completions", "/mesh/peers", "/events"):
        assert path in page.text


def test_administration() -> None:
    rig = Rig()
    with client(rig) as http:
        assert http.post("/admin/drain").json() == {"state": "ready"}
        assert http.post("/admin/resume", json={}).status_code == 200
        assert http.post("/admin/drain", content=b"garbage").status_code == 400
    assert rig.calls == ["drain", "resume"]


def test_c31_conversations_on_one_connection_do_not_mix() -> None:
    rig = Rig(FakeChain(tuple(b"answer")))
    a1 = [
        {"role": "user", "content": "A one"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "A two"},
    ]
    b1 = [{"role": "user", "content": "B alone"}]
    with client(rig) as http:
        answers = [
            http.post("/v1/chat/completions", json={"model": "tiny", "messages": m, "seed": 1}).json()
            for m in (a1, b1, a1)
        ]
    prompts = [bytes(request.prompt) for request in rig.chain.requests]
    assert prompts[0] == prompts[2]
    assert b"A" not in prompts[1].replace(b"assistant", b"")
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len(prompt) for prompt in prompts]
