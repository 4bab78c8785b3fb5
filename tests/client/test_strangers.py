"""The client at addresses that are none, with keys that are none, and at servers that are not ours: one kind of error for all."""

from __future__ import annotations

import json

import pytest

from meshd.client import AsyncClient, Client, NoEntry, RequestFailed
from meshd.client.entries import document
from meshd.client.over_httpx import not_an_address, settings
from meshd.errors import Unauthorized
from tests.api.rig import Rig, served
from tests.client.doors import DOORS, Door
from tests.client.stranger import stranger
from tests.fakes.chain import FakeChain

NO_ADDRESSES = [
    "http://127.0.0.1:abc",
    "http://127.0.0.1:99999",
    "http://[::1",
    "http://::1:80",
    "http://xn--zz",
    "http://..",
    f"http://{'a' * 300}",
    "http://h\0",
    "http://\udcff",
    "http://",
    "ftp://n1:8090",
    "n1:8090",
]
READ = ["/mesh/peers", "/mesh/hive", "/mesh/model", "/mesh/room", "/status", "/v1/routing"]


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_said_before_anything_is_asked(url: str) -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(NoEntry, match="is not an address"):
            client(["http://127.0.0.1:9", url])


@pytest.mark.parametrize("url", ["http://n1", "https://[::1]:8090/n1", "http://a_b.local.:1", "HTTP://10.0.0.1"])
def test_what_is_an_address(url: str) -> None:
    assert not not_an_address(url)


@pytest.mark.parametrize("key", ["mesh-1\n", "a key", "a\tkey", "\udcff"])
def test_a_key_that_cannot_be_one_is_not_shown(key: str) -> None:
    with pytest.raises(Unauthorized) as caught:
        Client(key=key)
    assert key.strip() not in caught.value.message


def test_a_key_beyond_ascii_goes_as_a_password() -> None:
    assert settings("mesh-1", 1.0)["headers"] == {"Authorization": "Bearer mesh-1"}
    assert settings("kéy", 1.0)["headers"] == {"Authorization": "Basic OmvDqXk="}


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize("body", ["{}", "[]", '"x"', "1", "null", '{"self": 1, "peers": [1]}', "[" * 5000])
def test_json_that_is_not_ours_is_known(path: str, body: str) -> None:
    with pytest.raises(RequestFailed, match=r"http://n1/.* is this meshd\?"):
        document(f"http://n1{path}", 200, body.encode())


@pytest.mark.parametrize(
    "body", ['{"detail": "Not Found"}', '{"error": "no"}', '{"error": {"message": 5}}', "<html>", "[]"]
)
def test_an_error_that_is_not_ours_is_known_too(body: str) -> None:
    with pytest.raises(RequestFailed, match=r"http://n1/status: HTTP 404, .* is this meshd\?") as caught:
        document("http://n1/status", 404, body.encode())
    assert caught.value.http_status == 404


def test_where_something_else_answers_the_next_entry_is_asked(door: Door) -> None:
    with stranger(b'{"detail": "Not Found"}') as other, served(Rig(FakeChain(tuple(b"yes")))) as node:
        assert door.get([other, node], "/status")["name"] == "n1"
        assert door.ask([other, node], "x", max_tokens=3)["text"] == "yes"


def test_a_stranger_is_named(door: Door) -> None:
    with stranger(b"{}") as url, pytest.raises(RequestFailed, match=url):
        door.get([url], "/status")


@pytest.mark.parametrize("name", ["sync", "asyncio"])  # trio warns of the generators that httpx leaves behind here
def test_bytes_that_cannot_be_read_are_a_failure_of_the_entry(name: str) -> None:
    door = DOORS[name]
    with stranger(b"not gzip", Content_Encoding="gzip") as url:
        with pytest.raises(NoEntry, match=url):
            door.get([url], "/status")
        with pytest.raises(NoEntry, match=url):
            door.ask([url], "x")


@pytest.mark.parametrize(
    "event", [[], "x", 1, {"error": "no"}, {"tokens": 5}, {"tokens": ["a"]}, {"text": 1, "tokens": [1]}, {"route": [1]}]
)
def test_events_that_are_not_ours_are_a_failure_of_the_entry(door: Door, event: object) -> None:
    with (
        stranger(f"data: {json.dumps(event)}\n\n".encode(), Content_Type="text/event-stream") as url,
        pytest.raises(NoEntry, match="no event of an answer"),
    ):
        door.ask([url], "x")
