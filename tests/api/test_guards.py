from __future__ import annotations

import base64
from typing import Any

import pytest

from meshd.api.guards import Access, ApiKey, Guards, KeyRefused, Right, host_names, parse_key_file
from meshd.api.message import Request
from meshd.errors import Forbidden, UsageError
from tests.api.rig import Rig, client
from tests.fakes.chain import FakeChain

MESH, READ, INFER = "mesh-key-0123456789", "read-key-0123456789", "infer-key-0123456789"
KEYS = (
    ApiKey.of(MESH, Right.ADMIN, own=True),
    *parse_key_file(f"# keys\n\nread {READ}\n  infer {INFER}\n", "keys.txt"),
)
REMOTE, LOCAL = "192.168.1.7", "127.0.0.1"


def request(client: str = REMOTE, method: str = "GET", **headers: str) -> Request:
    return Request(
        method, "/x", headers={name.replace("_", "-"): value for name, value in headers.items()}, client=client
    )


def bearer(key: str) -> str:
    return f"Bearer {key}"


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spell", [bearer, basic])
@pytest.mark.parametrize(
    ("key", "right", "allowed"),
    [
        *((MESH, right, True) for right in Right),
        *((INFER, right, right <= Right.INFER) for right in Right),
        *((READ, right, right <= Right.READ) for right in Right),
    ],
)
def test_rights(spell: Any, key: str, right: Right, allowed: bool) -> None:
    access = Access(KEYS)
    asked = request(authorization=spell(key))
    if allowed:
        access.tenant(asked, right)
    else:
        with pytest.raises(Forbidden, match="right"):
            access.tenant(asked, right)


@pytest.mark.parametrize("header", [{}, {"authorization": bearer("wrong")}, {"authorization": "Digest x"}])
def test_without_a_known_key_the_answer_says_where_it_is(header: dict[str, str]) -> None:
    with pytest.raises(KeyRefused, match="meshd key show --api"):
        Access(KEYS).tenant(request(**header), Right.READ)


BROKEN = ["Basic !!!", "Basic ###", "Basic", "Basic YQ", "Bearer", "nonsense", ""]


@pytest.mark.parametrize("header", BROKEN)
def test_a_broken_authorization_is_a_key_that_nobody_knows(header: str) -> None:
    with pytest.raises(KeyRefused, match="meshd key show --api"):
        Access(KEYS).tenant(request(authorization=header), Right.READ)
    assert Access(KEYS).tenant(request(LOCAL, authorization=header), Right.READ) == ""


@pytest.mark.parametrize("header", BROKEN)
def test_what_needs_no_key_does_not_look_at_any(header: str) -> None:
    guards = Guards(Access(KEYS, trust_loopback=False))
    with client(Rig(), guards=guards) as http:
        answers = [
            http.get(path, headers={"Authorization": header}) for path in ("/", "/healthz", "/readyz", "/status")
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 401]


@pytest.mark.parametrize("address", [LOCAL, "127.9.9.9", "::1"])
def test_callers_on_this_device_need_no_key_unless_a_key_file_is_given(address: str) -> None:
    assert Access(KEYS).tenant(request(address), Right.ADMIN) == ""
    with pytest.raises(KeyRefused):
        Access(KEYS, trust_loopback=False).tenant(request(address), Right.READ)


@pytest.mark.parametrize("header", ["forwarded", "x_forwarded_for", "x_real_ip"])
def test_a_proxy_on_this_device_does_not_lend_its_address(header: str) -> None:
    with pytest.raises(KeyRefused):
        Access(KEYS).tenant(request(LOCAL, **{header: "203.0.113.9"}), Right.READ)


@pytest.mark.parametrize("address", ["", "not an address", "8.8.8.8", "::ffff:8.8.8.8"])
def test_everybody_else_is_remote(address: str) -> None:
    with pytest.raises(KeyRefused):
        Access(KEYS).tenant(request(address), Right.READ)


def test_open_read_lets_everybody_see_and_nobody_ask() -> None:
    access = Access(KEYS, open_read=True)
    assert access.tenant(request(), Right.READ) == ""
    with pytest.raises(KeyRefused):
        access.tenant(request(), Right.INFER)


def test_open_all_is_for_a_room_without_any_key() -> None:
    assert Access(open_all=True).tenant(request(), Right.ADMIN) == ""


def test_each_key_is_a_tenant_of_its_own() -> None:
    access = Access(KEYS)
    tenants = [access.tenant(request(authorization=bearer(key)), Right.READ) for key in (MESH, READ, INFER)]
    assert tenants[0] == ""
    assert len(set(tenants)) == 3
    assert not any(key in repr(KEYS) for key in (MESH, READ, INFER))


@pytest.mark.parametrize(
    "line", ["write abcdefghijklmnopqrst", "infer", "infer short", "infer two words here please", "x"]
)
def test_a_wrong_line_in_a_key_file_is_named(line: str) -> None:
    with pytest.raises(UsageError, match=r"keys\.txt line 2.*--api-key-file"):
        parse_key_file(f"# first\n{line}\n", "keys.txt")


# --- web pages --------------------------------------------------------------------------------------------------------

GUARDS = Guards(names=host_names(["n1", "Room.Example", "pi."]))


@pytest.mark.parametrize(
    "host",
    [
        *[
            "localhost",
            "localhost:8090",
            "LOCALHOST:1",
            "127.0.0.1:8090",
            "192.168.1.5",
            "[::1]:8090",
            "[fe80::1%eth0]:1",
        ],
        *["n1", "n1:8090", "N1.local", "room.example:80", "room.example.", "pi"],
    ],
)
def test_own_hosts(host: str) -> None:
    GUARDS.page(request(host=host), None)


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:8090",
        "localhost.evil.com",
        "n1.evil.com",
        "",
        "127.0.0.1.evil.com",
        "evil.com@n1",
        "a:b:c",
    ],
)
def test_foreign_hosts(host: str) -> None:
    with pytest.raises(Forbidden, match="--advertise"):
        GUARDS.page(request(host=host), None)


def test_an_absolute_target_is_checked_too() -> None:
    with pytest.raises(Forbidden):
        GUARDS.page(request(host="localhost"), "evil.com")


JSON = {"content_type": "application/json; charset=utf-8"}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "origin", ["http://evil.com", "null", "http://n1:81", "https://n1.evil.com", "file://", "n1", ""]
)
def test_foreign_origins(method: str, origin: str) -> None:
    with pytest.raises(Forbidden):
        GUARDS.page(request(method=method, host="n1:80", origin=origin, **JSON), None)


def test_the_own_page_must_say_json() -> None:
    GUARDS.page(request(method="POST", host="n1:80", origin="http://n1:80", **JSON), None)
    GUARDS.page(request(method="POST", host="n1", origin="https://N1", **JSON), None)
    GUARDS.page(request(host="n1:80", origin="http://n1:80"), None)
    for kind in ({}, {"content_type": "text/plain"}, {"content_type": "application/jsonx"}):
        with pytest.raises(Forbidden, match="application/json"):
            GUARDS.page(request(method="POST", host="n1:80", origin="http://n1:80", **kind), None)


def test_other_sites_cannot_load_things_from_here_but_may_link() -> None:
    with pytest.raises(Forbidden):
        GUARDS.page(request(host="n1", sec_fetch_site="cross-site", sec_fetch_mode="no-cors"), None)
    GUARDS.page(request(host="n1", sec_fetch_site="cross-site", sec_fetch_mode="navigate"), None)
    GUARDS.page(request(host="n1", sec_fetch_site="same-origin", sec_fetch_mode="cors"), None)


# --- over HTTP --------------------------------------------------------------------------------------------------------

PATHS = ["/", "/healthz", "/readyz", "/status", "/mesh/hive", "/v1/models", "/metrics", "/nowhere"]


@pytest.mark.parametrize("path", PATHS)
def test_no_route_is_left_out_of_the_host_check(path: str) -> None:
    with client(Rig()) as http:
        assert http.get(path, headers={"Host": "evil.com"}).status_code == 403
        assert http.post(path, headers={"Origin": "http://evil.com"}).status_code == 403


def test_which_routes_need_which_right() -> None:
    guards = Guards(Access(KEYS, trust_loopback=False))
    needs = {"/status": Right.READ, "/mesh/peers": Right.READ, "/events": Right.READ, "/v1/models": Right.READ}
    posts = {
        **dict.fromkeys(("/chain", "/v1/completions", "/v1/chat/completions"), Right.INFER),
        **dict.fromkeys(("/embed", "/forward", "/lm-head"), Right.INFER),
        **dict.fromkeys(("/admin/drain", "/admin/resume"), Right.ADMIN),
    }
    rig = Rig(FakeChain(tuple(b"abc")))
    with client(rig, guards=guards) as http:
        for path in ("/", "/healthz", "/readyz"):
            assert http.get(path).status_code == 200
        for method, paths in (("GET", needs), ("POST", posts)):
            for path, right in paths.items():
                bare = http.request(method, path)
                assert bare.status_code == 401, path
                assert "meshd key show --api" in bare.json()["error"]["message"]
                assert "Basic" in bare.headers["www-authenticate"]
                for key, has in ((READ, Right.READ), (INFER, Right.INFER)):
                    if right > has:
                        refused = http.request(method, path, headers={"Authorization": bearer(key)})
                        assert refused.status_code == 403, (path, key)
        assert http.post("/admin/drain", headers={"Authorization": basic(MESH)}).status_code == 200
        asked = http.post("/chain", json={"prompt": "hi"}, headers={"Authorization": bearer(INFER)})
        assert asked.status_code == 200
    assert rig.calls == ["drain"]
    assert rig.chain.requests[0].tenant == KEYS[2].tenant != ""


def test_a_refused_caller_is_refused_before_its_body() -> None:
    guards = Guards(Access(KEYS, trust_loopback=False))
    with client(Rig(), guards=guards) as http:
        answer = http.post("/forward", content=b"x" * 1_000_000)
    assert (answer.status_code, answer.headers["connection"]) == (401, "close")
