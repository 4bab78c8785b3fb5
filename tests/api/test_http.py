"""The server's own duties, over real sockets: framing, limits, the client's leaving, the end."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.api.connection import Plan
from meshd.api.http import HttpServer, listen
from meshd.api.limits import Limits
from meshd.api.message import Request, Response, Writer, json_response
from meshd.api.sse import SSE_HEADERS, frame
from meshd.errors import CallerError, LocalError
from meshd.vocabulary import Endpoint

LOOPBACK = Endpoint("127.0.0.1", 0)
SMALL = replace(Limits(), body_bytes=1000, linger_s=0.2, grace_s=0.2)
FAST = replace(SMALL, header_s=0.1, body_s=0.1, idle_s=0.1, write_s=0.1)


@dataclass
class Echo:
    """Answers every request with what it was; ``/wait`` waits until it is cancelled, ``/events`` after a first event;
    ``/stream`` sends for ever."""

    requests: list[Request] = field(default_factory=list)
    entered: trio.Event = field(default_factory=trio.Event)
    cancelled: trio.Event = field(default_factory=trio.Event)
    release: trio.Event = field(default_factory=trio.Event)

    def plan(self, head: Request, authority: str | None) -> Plan:
        if head.path == "/refuse":
            raise CallerError("refused from the head")
        live = head.path == "/live"
        return Plan(None, self.answer, health=head.path == "/healthz", live=live)

    async def answer(self, request: Request, writer: Writer) -> Response | None:
        self.requests.append(request)
        self.entered.set()
        if request.path in ("/wait", "/events"):
            try:
                if request.path == "/events":
                    await writer.start(200, SSE_HEADERS)
                    await writer.send(frame(1))
                await self.release.wait()
            except trio.Cancelled:
                self.cancelled.set()
                raise
        if request.path == "/live":
            await writer.start(200, ())
            await trio.sleep_forever()
        if request.path == "/stream":
            try:
                await writer.start(200, (("Content-Type", "text/plain"),))
                while True:
                    await writer.send(b"x" * 65536)
            finally:
                self.cancelled.set()
        if request.path == "/crash":
            raise ValueError("a secret detail")
        if request.path == "/half":
            await writer.start(200, ())
            await writer.send(b"some")
            raise ValueError("after the start")
        if request.path == "/group":
            async with trio.open_nursery():
                raise CallerError("from a nursery")
        return json_response({"method": request.method, "path": request.path, "size": len(request.body)})


@asynccontextmanager
async def serving(limits: Limits = SMALL) -> AsyncIterator[tuple[HttpServer, Echo]]:
    app = Echo()
    server = HttpServer(app, await listen([LOOPBACK]), limits)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        yield server, app
        server.shutdown()


def run(test: Callable[[HttpServer, Echo], Awaitable[None]], limits: Limits = SMALL) -> None:
    async def main() -> None:
        with trio.fail_after(20):
            async with serving(limits) as (server, app):
                await test(server, app)

    trio.run(main)


async def connect(server: HttpServer) -> trio.SocketStream:
    endpoint = server.endpoints[0]
    return await trio.open_tcp_stream(endpoint.host, endpoint.port)


async def read_all(stream: trio.SocketStream) -> bytes:
    data = bytearray()
    try:
        async for part in stream:
            data += part
    except trio.BrokenResourceError:
        pass
    return bytes(data)


async def read_answer(stream: trio.SocketStream) -> tuple[int, dict[str, str], bytes]:
    """One answer with a Content-Length, from a connection that stays open."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = await stream.receive_some()
        assert part, f"closed after {data!r}"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += await stream.receive_some()
    return int(status.split()[1]), headers, body


async def ask(server: HttpServer, raw: bytes) -> tuple[int, dict[str, str], Any]:
    async with await connect(server) as stream:
        await stream.send_all(raw)
        status, headers, body = await read_answer(stream)
    return status, headers, json.loads(body) if body else None


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def post(path: str, body: bytes, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


# --- framing ----------------------------------------------------------------------------------------------------------


def test_requests_follow_each_other_on_one_connection() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            for number in range(3):
                await stream.send_all(post(f"/{number}", b"x" * number))
                status, _, body = await read_answer(stream)
                assert (status, json.loads(body)["size"]) == (200, number)

    run(test)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(get("/a") + post("/b", b"xyz") + get("/c", "Connection: close"))
            answers = await read_all(stream)
        assert re.findall(rb'"path":"(.*?)"', answers) == [b"/a", b"/b", b"/c"]

    run(test)


def test_a_chunked_body_and_a_slow_one() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            raw = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            for at in range(len(raw)):
                await stream.send_all(raw[at : at + 1])
            status, _, _ = await read_answer(stream)
        assert (status, app.requests[0].body) == (200, b"abcde")

    run(test)


def test_head_has_the_length_but_no_body() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(b"HEAD /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head, _, body = (await read_all(stream)).partition(b"\r\n\r\n")
        assert body == b""
        assert int(re.findall(rb"(?i)content-length: (\d+)", head)[0]) > 10

    run(test)


def test_http_1_0_is_answered_and_closed() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(b"GET /old HTTP/1.0\r\n\r\n")
            assert b'"path":"/old"' in await read_all(stream)

    run(test)


def test_the_body_is_asked_for_when_the_client_waits_for_that() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(
                b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
            )
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 100 ")
            await stream.send_all(b"abc")
            assert (await read_answer(stream))[0] == 200

    run(test)


def test_a_refused_head_never_asks_for_the_body() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            head = b"POST /refuse HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
            await stream.send_all(head)
            status, headers, _ = await read_answer(stream)
        assert (status, headers["connection"], app.requests) == (400, "close", [])

    run(test)


def test_request_ids_are_taken_when_tame_and_made_otherwise() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        _, headers, _ = await ask(server, get("/", "X-Request-Id: my-id.7"))
        assert headers["x-request-id"] == "my-id.7"
        _, headers, _ = await ask(server, get("/", "X-Request-Id: <script>"))
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
        assert app.requests[-1].request_id == headers["x-request-id"]

    run(test)


def test_every_answer_keeps_browsers_in_check() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        for raw in (get("/"), get("/refuse"), b"nonsense\r\n\r\n"):
            _, headers, _ = await ask(server, raw)
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["content-security-policy"].startswith("default-src 'none'")

    run(test)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nBad Name: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # a TLS client
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001, 413),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 19 + b"\r\n\r\n", 413),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET /" + b"a" * 20000, 414),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20000, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 5000, 431),
        (b"GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n", 404),
        (b"GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n", 404),
        (b"GET /%ff HTTP/1.1\r\nHost: a\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 404),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    ],
)
def test_bad_input_is_answered_with_an_error_document(raw: bytes, status: int) -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        found, _, document = await ask(server, raw)
        assert found == status
        assert set(document["error"]) >= {"message", "type", "param", "code"}
        assert app.requests == []
        assert (await ask(server, get("/")))[0] == 200

    run(test)


def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n" + b"x" * 1_000_000)
            assert (await read_answer(stream))[0] == 413

    run(test)


def test_a_crash_is_500_without_details_and_the_connection_lives_on() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(get("/crash", "X-Request-Id: r1"))
            status, _, body = await read_answer(stream)
            assert status == 500
            assert b"secret" not in body
            assert b"r1" in body
            await stream.send_all(get("/"))
            assert (await read_answer(stream))[0] == 200

    run(test)


def test_a_crash_after_the_start_breaks_the_answer_off() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(get("/half"))
            answer = await read_all(stream)
        assert b"some" in answer
        assert not answer.endswith(b"0\r\n\r\n")  # so that no client takes it for whole

    run(test)


def test_an_error_out_of_a_nursery_keeps_its_status() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        status, _, document = await ask(server, get("/group"))
        assert (status, document["error"]["message"]) == (400, "from a nursery")

    run(test)


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab"])
def test_a_client_that_does_not_finish_is_told_408(sent: bytes) -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        status, headers, _ = await ask(server, sent)
        assert (status, headers["connection"]) == (408, "close")

    run(test, FAST)


def test_a_byte_now_and_then_does_not_keep_a_request_alive() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            with trio.move_on_after(10) as patience:
                try:
                    for byte in b"GET / HTTP/1.1\r\nX: " + b"a" * 4000:
                        await stream.send_all(bytes([byte]))
                        await trio.sleep(0.01)
                except trio.BrokenResourceError:
                    pass
            assert not patience.cancelled_caught
        assert app.requests == []

    run(test, FAST)


def test_silent_and_idle_connections_are_closed() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as silent, await connect(server) as idle:
            await idle.send_all(get("/"))
            await read_answer(idle)
            assert await read_all(silent) == b""
            assert await read_all(idle) == b""

    run(test, FAST)


def test_a_client_that_does_not_read_loses_its_own_answer_only() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(get("/stream"))
            await app.cancelled.wait()
        assert (await ask(server, get("/")))[0] == 200

    run(test, FAST)


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/wait", "/stream"])
def test_the_clients_leaving_cancels_its_handler(path: str) -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(get(path))
            await app.entered.wait()
        await app.cancelled.wait()
        while server.connections:
            await trio.sleep(0)

    run(test)


def test_what_a_waiting_client_sends_ahead_is_bounded() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(get("/wait"))
            await app.entered.wait()
            try:
                for _ in range(1000):
                    await stream.send_all(b"x" * 65536)
            except trio.BrokenResourceError:
                pass
            await app.cancelled.wait()

    run(test)


# --- how many ---------------------------------------------------------------------------------------------------------


def test_beyond_the_limit_only_health_checks_are_answered() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as one, await connect(server) as two:
            for stream in (one, two):
                app.entered = trio.Event()
                await stream.send_all(get("/wait"))
                await app.entered.wait()
            status, headers, _ = await ask(server, get("/"))
            assert (status, "retry-after" in headers, headers["connection"]) == (429, True, "close")
            assert (await ask(server, get("/healthz")))[0] == 200
            app.release.set()
            assert (await read_answer(one))[0] == 200
            assert (await ask(server, get("/")))[0] == 200

    run(test, replace(SMALL, connections=2, reserve=1))


def test_beyond_the_reserve_connections_are_closed() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as one:
            await one.send_all(get("/wait"))
            await app.entered.wait()
            async with await connect(server) as two:
                await two.send_all(b"GET / HT")
                while server.connections < 2 or server.waiting:
                    await trio.sleep(0)
                async with await connect(server) as three:
                    assert await read_all(three) == b""
                assert server.refused == 1

    run(test, replace(SMALL, connections=1, reserve=1))


def test_an_idle_connection_makes_room() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as idle:
            await idle.send_all(get("/"))
            await read_answer(idle)
            assert (await ask(server, get("/")))[0] == 200
            assert await read_all(idle) == b""

    run(test, replace(SMALL, connections=1, reserve=1))


def test_a_request_waits_for_the_place_of_those_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many connect at once and none has had the time to prove itself silent; the one with a request is served all the same."""
    monkeypatch.setattr("meshd.api.connection._FIRST_S", 0.2)

    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as silent, await connect(server), await connect(server) as asks:
            for _ in range(2):  # it has a place of its own then, and keeps it
                await asks.send_all(get("/"))
                assert (await read_answer(asks))[0] == 200
            assert await read_all(silent) == b""

    run(test, replace(SMALL, connections=2, reserve=2))


def test_bodies_share_a_budget_that_is_given_back() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(post("/wait", b"x" * 900))
            await app.entered.wait()
            status, headers, _ = await ask(server, post("/", b"x" * 900))
            assert (status, headers["retry-after"]) == (429, "1")
        await app.cancelled.wait()
        while server.connections:
            await trio.sleep(0)
        assert (await ask(server, post("/", b"x" * 900)))[0] == 200

    run(test, replace(SMALL, all_bodies_bytes=1000))


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/wait", "/stream"])
def test_shutdown_ends_although_a_client_does_not_read(path: str) -> None:
    async def main() -> None:
        with trio.fail_after(10):
            async with serving() as (server, app):
                stream = await connect(server)
                await stream.send_all(get(path))
                await app.entered.wait()
            assert app.cancelled.is_set()
            await stream.aclose()

    trio.run(main)


def test_shutdown_lets_a_running_answer_finish_and_closes_idle_connections() -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as busy, await connect(server) as idle:
            await idle.send_all(get("/"))
            await read_answer(idle)
            app.entered = trio.Event()
            await busy.send_all(get("/wait"))
            await app.entered.wait()
            server.shutdown()
            server.shutdown()
            assert await read_all(idle) == b""
            with pytest.raises(OSError):  # noqa: PT011 - whichever way the system says that nobody listens
                await connect_to(address)
            app.release.set()
            assert b"200" in (await read_all(busy))[:20]

    address = Endpoint("127.0.0.1", 0)

    async def connect_to(endpoint: Endpoint) -> None:
        await trio.open_tcp_stream(endpoint.host, endpoint.port)

    async def main() -> None:
        nonlocal address
        with trio.fail_after(10):
            async with serving(replace(SMALL, grace_s=10)) as (server, app):
                address = server.endpoints[0]
                await test(server, app)

    trio.run(main)


@pytest.mark.parametrize("path", ["/wait", "/events"])
def test_shutdown_tells_whoever_it_waits_for_no_longer(path: str) -> None:
    async def main() -> bytes:
        with trio.fail_after(10):
            async with serving() as (server, app):
                stream = await connect(server)
                await stream.send_all(get(path))
                await app.entered.wait()
            async with stream:
                return await read_all(stream)

    head, _, body = trio.run(main).partition(b"\r\n\r\n")
    if path == "/wait":
        assert head.startswith(b"HTTP/1.1 503")
        told = json.loads(body)["error"]
    else:
        first, last = re.findall(rb"data: (.*)\n\n", body)
        assert first == b"1"
        assert body.endswith(b"0\r\n\r\n")
        told = json.loads(last)["error"]
        assert told["status"] == 503
    assert (told["code"], "this node stops" in told["message"]) == ("not_ready", True)


def test_shutdown_does_not_wait_for_what_never_ends() -> None:
    async def main() -> None:
        with trio.fail_after(10):  # far below the grace
            async with serving(replace(SMALL, grace_s=1000)) as (server, app):
                stream = await connect(server)
                await stream.send_all(get("/live"))
                await app.entered.wait()
            await stream.aclose()

    trio.run(main)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_whatever_comes_in_the_server_goes_on(raw: bytes) -> None:
    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as stream:
            await stream.send_all(raw)
            await stream.send_eof()
            answer = await read_all(stream)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
        assert not answer.startswith(b"HTTP/1.1 5")
        assert (await ask(server, get("/")))[0] == 200

    run(test)


# --- addresses --------------------------------------------------------------------------------------------------------


def test_a_busy_port_is_named_with_its_flag() -> None:
    async def main() -> None:
        (first,) = await listen([LOOPBACK])
        port = first.socket.getsockname()[1]
        with pytest.raises(LocalError, match=rf"127\.0\.0\.1:{port} \(--http\): the port is in use"):
            await listen([LOOPBACK, Endpoint("127.0.0.1", port)])
        await first.aclose()
        for listener in await listen([Endpoint("127.0.0.1", port)]):  # nothing of the failed attempt is left
            await listener.aclose()

    trio.run(main)


def test_an_address_of_another_device_is_refused() -> None:
    with pytest.raises(LocalError, match="no such address"):
        trio.run(listen, [Endpoint("203.0.113.1", 0)])


def test_ipv6() -> None:
    async def main() -> None:
        with trio.fail_after(10):
            app = Echo()
            server = HttpServer(app, await listen([LOOPBACK, Endpoint("::1", 0)]), SMALL)
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                v6 = server.endpoints[1]
                async with await trio.open_tcp_stream("::1", v6.port) as stream:
                    await stream.send_all(get("/"))
                    assert (await read_answer(stream))[0] == 200
                assert app.requests[0].client == "::1"
                server.shutdown()

    trio.run(main)


@pytest.mark.parametrize(
    "begun", [b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nslow", b"GET / HTTP/1.1\r\nHos"]
)
def test_a_request_that_does_not_come_makes_room(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places send half a request: who has something to say is served all the same."""
    monkeypatch.setattr("meshd.api.connection._FIRST_S", 0.05)

    async def test(server: HttpServer, app: Echo) -> None:
        async with await connect(server) as slow, await connect(server) as slower:
            for stream in (slow, slower):
                await stream.send_all(begun)
            while server.connections < 2 or server.waiting:
                await trio.sleep(0)
            await trio.sleep(0.1)  # they are given half of that
            assert (await ask(server, get("/")))[0] == 200
            async with await connect(server) as quick:
                await quick.send_all(get("/"))
                assert (await read_answer(quick))[0] == 200
            assert b" 408 " in await read_all(slow)

    run(test, replace(SMALL, connections=2, reserve=1))
