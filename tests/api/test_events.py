from __future__ import annotations

import json

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from meshd.api.app import App
from meshd.api.events import QUEUE_EVENTS, EventQueue
from meshd.api.http import HttpServer, listen
from tests.api.rig import LOOPBACK, Rig, client


def taken(queue: EventQueue) -> list[dict[str, object]]:
    async def main() -> list[dict[str, object]]:
        with trio.fail_after(5):
            return [dict(event) for event in await queue.take()]

    return trio.run(main)


@given(st.integers(1, 20), st.integers(1, 8))
def test_a_full_queue_loses_the_oldest_and_says_how_many(count: int, size: int) -> None:
    queue = EventQueue(size)
    for number in range(count):
        queue.put({"n": number})
    events = taken(queue)
    lost = max(0, count - size)
    if lost:
        assert events.pop(0) == {"ev": "lost", "count": lost}
    assert [event["n"] for event in events] == list(range(lost, count))
    queue.put({"n": "next"})
    assert taken(queue) == [{"n": "next"}]


async def _next_event(stream: trio.SocketStream, seen: bytearray) -> dict[str, object]:
    while b"data: " not in seen or b"\n\n" not in seen[seen.index(b"data: ") :]:
        part = await stream.receive_some()
        assert part
        seen += part
    start = seen.index(b"data: ")
    end = seen.index(b"\n\n", start)
    document: dict[str, object] = json.loads(bytes(seen[start + 6 : end]))
    del seen[: end + 2]
    return document


def test_events_come_as_they_happen_and_the_latest_on_request() -> None:
    async def main() -> None:
        rig = Rig()
        server = HttpServer(App(rig.node()), await listen([LOOPBACK]))
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                rig.log.emit("join", number=1)
                rig.log.emit("join", number=2)
                stream = await trio.open_tcp_stream("127.0.0.1", server.endpoints[0].port)
                await stream.send_all(b"GET /events?last=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                seen = bytearray()
                assert (await _next_event(stream, seen))["number"] == 2
                rig.log.emit("failed", number=3)
                event = await _next_event(stream, seen)
                assert (event["ev"], event["number"], event["name"]) == ("failed", 3, "n1")
                await stream.aclose()
                while server.connections:
                    await trio.sleep(0)
                server.shutdown()

    trio.run(main)


@pytest.mark.parametrize("last", ["x", "-1", "1e3", "", "99999999"])
def test_last_must_be_a_number(last: str) -> None:
    with client(Rig()) as http:
        assert http.get("/events", params={"last": last}).status_code == 400


def test_a_client_that_never_reads_keeps_a_bounded_number() -> None:
    queue = EventQueue()
    for number in range(10 * QUEUE_EVENTS):
        queue.put({"n": number})
    assert len(taken(queue)) == QUEUE_EVENTS + 1
