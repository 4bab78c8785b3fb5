"""The client by each of its doors against real servers with a scripted chain: answers, errors and dying entries."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import pytest
import trio

from meshd.client import AsyncClient, NoEntry, RequestFailed
from meshd.errors import StageUnavailable
from meshd.vocabulary import LayerRange
from tests.api.rig import Rig, served
from tests.client.doors import DOORS, Door
from tests.fakes.chain import FakeChain
from tests.rooms import until

IDS = tuple(b"a quiet night at sea")


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]


def rig(**more: object) -> Rig:
    return Rig(chain=FakeChain(ids=IDS, **more))  # type: ignore[arg-type]  # test shorthand


def test_a_whole_answer(door: Door) -> None:
    with served(rig()) as url:
        answer = door.ask([url], "x", max_tokens=len(IDS))
    assert (answer["text"], answer["finish_reason"]) == ("a quiet night at sea", "length")


def test_pieces_carry_the_route_from_the_start(door: Door) -> None:
    with served(rig(step=3)) as url:
        pieces = door.stream([url], max_tokens=9)
    assert [piece.route for piece in pieces[:-1]] == [("n1", "n2")] * 3
    assert "".join(piece.text for piece in pieces) == "a quiet n"


def test_an_entry_that_fails_in_mid_answer_costs_no_token(door: Door) -> None:
    """The second entry gets the seed and the ids, and sends only what follows."""
    broken = rig(error=StageUnavailable([LayerRange(15, 30)]), error_at=7)
    sound = rig()
    with served(broken) as first, served(sound) as second:
        pieces = door.stream([first, second], max_tokens=len(IDS))
    assert bytes(token for piece in pieces for token in piece.tokens) == bytes(IDS)
    assert pieces[-1].final is not None
    assert pieces[-1].final["tokens"] == list(IDS)
    assert sound.chain.requests[0].forced == IDS[:7]
    assert sound.chain.requests[0].sampling.seed == broken.chain.requests[0].sampling.seed


def whole_request(near: socket.socket) -> bytes:
    """Head and body, as far as the head says."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += near.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += near.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def cutting_proxy(url: str, after_bytes: int) -> Iterator[str]:
    """A way to an entry that breaks, without a word, when so many bytes of the answer have passed."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection((host, int(port))) as far:
            far.sendall(whole_request(near))
            passed = 0
            while passed < after_bytes and (data := far.recv(min(64, after_bytes - passed))):
                near.sendall(data)
                passed += len(data)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(10)
        listener.close()


@pytest.mark.parametrize("after_bytes", [0, 40, 700, 900, 1100, 1300])
def test_an_entry_that_dies_without_a_word(door: Door, after_bytes: int) -> None:
    with served(rig()) as url, cutting_proxy(url, after_bytes) as dying:
        pieces = door.stream([dying, url], max_tokens=len(IDS))
    assert bytes(token for piece in pieces for token in piece.tokens) == bytes(IDS)


def test_an_entry_that_is_silent_is_left(door: Door) -> None:
    """The first entry accepts and never says a word again, as one whose device hangs: the kernel still takes connections."""
    with served(rig()) as url, socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"http://127.0.0.1:{silent.getsockname()[1]}"
        pieces = door.stream([dead, dead, url], silence_s=0.3, max_tokens=len(IDS))
    assert bytes(token for piece in pieces for token in piece.tokens) == bytes(IDS)
    assert {piece.entry for piece in pieces} == {url}


def test_a_stream_that_is_closed_ends_the_request(door: Door) -> None:
    one = rig(hold_at=4)
    with served(one) as url:
        assert len(door.stream([url], first=2, max_tokens=len(IDS))) == 2
        until(lambda: one.chain.running == 0, "nothing runs")


def test_any_number_of_streams_at_a_time() -> None:
    """Each has its own connection: one that had to wait for another's would take the entries for silent."""
    one, many = rig(hold_at=1), 104

    async def main(url: str) -> None:
        begun = set[int]()
        async with AsyncClient([url, url]) as room, trio.open_nursery() as nursery:

            async def listen(number: int) -> None:
                async with aclosing(room.stream("x", patience_s=0.0, max_tokens=len(IDS))) as pieces:
                    async for _ in pieces:
                        begun.add(number)
                        if len(begun) == many:
                            nursery.cancel_scope.cancel()

            for number in range(many):
                nursery.start_soon(listen, number)

    with served(one) as url:
        trio.run(main, url)


def test_a_conversation_keeps_what_was_said(door: Door) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    with served(rig()) as url:
        door.chat([url], messages, "Where?", max_tokens=7)
        door.chat([url], messages, "And?", first=3, max_tokens=7)
    assert [(one["role"], one["content"]) for one in messages[1:]] == [
        ("user", "Where?"),
        ("assistant", "a quiet"),
        ("user", "And?"),
        ("assistant", "a q"),
    ]


def test_nobody_there_is_said_with_the_address(door: Door) -> None:
    with pytest.raises(NoEntry, match=r"127\.0\.0\.1:9"):
        door.get(["http://127.0.0.1:9"], "/status")
    with pytest.raises(NoEntry, match=r"127\.0\.0\.1:9"):
        door.stream(["http://127.0.0.1:9", "http://127.0.0.1:9/"], patience_s=0.0)


def test_the_callers_fault_is_not_tried_elsewhere(door: Door) -> None:
    one, two = rig(), rig()
    with served(one) as first, served(two) as second:
        with pytest.raises(RequestFailed, match="max_tokens") as caught:
            door.ask([first, second], "x", max_tokens=0)
        assert caught.value.http_status == 400
        with pytest.raises(RequestFailed) as unknown:
            door.get([first, second], "/nothing/here")
        assert unknown.value.http_status == 404
    assert not two.chain.requests


def test_documents_from_the_next_entry_when_the_first_is_gone(door: Door) -> None:
    with served(rig()) as url:
        assert door.get(["http://127.0.0.1:9", url], "/mesh/hive")["status"] == "healthy (no redundancy)"
        assert "ok" in door.text(["http://127.0.0.1:9", url], "/healthz")
