"""Whom a node lets answer in its place."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import cast

import pytest
import trio
import trio.testing

from meshd.api.app import App
from meshd.api.http import HttpServer, listen
from meshd.api.message import Headers, Request
from meshd.directory import Directory
from meshd.errors import (
    Busy,
    DeadlineExceeded,
    LinkLost,
    MeshdError,
    NoOtherEntry,
    NotReady,
    PeerError,
    StageUnavailable,
    WrongPeer,
)
from meshd.links.wire import Link, Message, Stream
from meshd.node.pass_on import Passer, entries, take_over
from meshd.vocabulary import Endpoint, LayerRange, NodeId
from tests.api.rig import Rig, member
from tests.fakes.chain import N1, N2, FakeChain
from tests.fakes.links import FakeLinks, FakeNet, Inbound


@pytest.mark.parametrize(
    ("digest", "layers", "admitted", "trusted"),
    [
        ("d1", (0, 30), True, True),
        ("d1", (0, 30), None, False),
        ("d1", (0, 30), False, False),
        ("d1", None, None, True),
        ("d2", (0, 4), None, True),
        ("d2", (0, 4), False, False),
    ],
)
def test_who_holds_layers_must_have_proven_them_where_that_can_be_judged(
    digest: str, layers: tuple[int, int] | None, admitted: bool | None, trusted: bool
) -> None:
    me = member(N1, "n1", (0, 30), digest="d1")
    room = Directory(N1).replace([me, member(N2, "n2", layers, digest=digest, admitted=admitted)])
    assert [found.node_id for found in entries(room, digest)] == ([N2] if trusted else [])


def test_who_names_no_model_is_not_answered_by_another_than_the_asked_nodes() -> None:
    other = member(N2, "n2", (0, 4), digest="d2", admitted=None)
    assert entries(Directory(N1).replace([member(N1, "n1", (0, 30), digest="d1"), other]), "") == []
    assert entries(Directory(N1).replace([member(N1, "n1", None, digest=""), other]), "") == [other]


class Client:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.started, self.got = False, b""

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True

    async def send(self, data: bytes) -> None:
        self.got += data


class Refusing:
    """Links to nobody, for one reason or another."""

    def __init__(self, problem: PeerError) -> None:
        self.problem, self.asked = problem, list[NodeId]()

    async def get(self, node_id: NodeId) -> Link:
        self.asked.append(node_id)
        raise self.problem


@pytest.mark.parametrize("problem", [LinkLost("reset"), WrongPeer("somebody else answers there")])
def test_what_a_peer_did_is_not_the_clients_affair(problem: PeerError) -> None:
    links = Refusing(problem)
    room = Directory(N1).replace([member(N1, "n1", None), member(N2, "n2", (0, 30))])
    passer = Passer(links, lambda: room)  # type: ignore[arg-type]  # only `get` is used

    async def main() -> None:
        with pytest.raises(NotReady, match=f"another entry answer, and that one did not: {problem.message}"):
            await passer(Request("POST", "/chain", body=b"{}"), Client(), digest="", deadline_s=None)

    trio.run(main)
    assert links.asked == [N2] * (2 if isinstance(problem, LinkLost) else 1)  # a link alone may have broken


def test_that_there_is_no_other_entry_is_told_as_such() -> None:
    passer = Passer(Refusing(LinkLost("reset")), lambda: Directory(N1).replace([member(N1, "n1", None)]))  # type: ignore[arg-type]  # nobody is asked

    async def main() -> None:
        with pytest.raises(NoOtherEntry):
            await passer(Request("POST", "/chain", body=b"{}"), Client(), digest="", deadline_s=None)

    trio.run(main)


N3 = NodeId("3" * 32)
ROOM = Directory(N1).replace([member(N1, "n1", None), member(N2, "n2", (0, 30)), member(N3, "n3", (0, 30))])


async def serve(links: FakeLinks, app: App) -> None:
    async with aclosing(cast(AsyncGenerator[Inbound], links.inbound())) as inbound:
        async for peer, message, stream in inbound:
            with suppress(MeshdError):  # who asked has left
                await take_over(app, peer, message, stream)


ASKED = Request("POST", "/chain", body=b'{"prompt": "hi"}')
IDS = tuple(b"a quiet night")


def asked_of(first: Rig, second: Rig) -> tuple[int, bytes]:
    """What a client of an entry without layers is answered where ``first`` is asked first."""

    async def main() -> tuple[int, bytes]:
        net = FakeNet()
        passer = Passer(net.join(N1), lambda: ROOM)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, net.join(N2), App(first.node()))
            nursery.start_soon(serve, net.join(N3), App(second.node()))
            with trio.fail_after(5):
                answer = await passer(ASKED, Client(), digest="", deadline_s=None)
            nursery.cancel_scope.cancel()
        assert answer is not None
        return answer.status, answer.body

    return trio.run(main)


def draining() -> Rig:
    return Rig(text=None)


def failing(error: MeshdError) -> Rig:
    return Rig(FakeChain(tuple(b"no"), error=error))


@pytest.mark.parametrize("first", [draining(), failing(NotReady("not yet")), failing(Busy("full"))])
def test_an_entry_that_takes_nothing_now_costs_no_answer(first: Rig) -> None:
    status, body = asked_of(first, Rig(FakeChain(tuple(b"yes"))))
    assert (status, b'"text":"y"' in body) == (200, True)


def test_what_every_entry_would_say_is_the_answer() -> None:
    second = Rig(FakeChain(tuple(b"yes")))
    status, body = asked_of(failing(StageUnavailable([LayerRange(15, 30)])), second)
    assert (status, b'"missing":[[15,30]]' in body) == (503, True)
    assert not second.chain.requests


def test_where_all_are_full_or_leave_the_client_hears_when_to_come_again() -> None:
    for first, second in (
        (failing(Busy("full", retry_after_s=7)), draining()),
        (draining(), failing(Busy("full", retry_after_s=7))),
    ):
        with pytest.raises(ExceptionGroup) as caught:
            asked_of(first, second)
        (busy,) = caught.value.exceptions
        assert isinstance(busy, Busy)
        assert busy.retry_after_s == 7
    with pytest.raises(ExceptionGroup) as caught:
        asked_of(draining(), draining())
    assert isinstance(caught.value.exceptions[0], NotReady)


def test_an_entry_that_falls_silent_is_left_for_another_and_the_deadline_goes_on() -> None:
    second = Rig(FakeChain(tuple(b"yes")))

    async def main() -> float:
        net = FakeNet()
        passer = Passer(net.join(N1), lambda: ROOM)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            net.join(N2)  # takes the request and never says anything
            nursery.start_soon(serve, net.join(N3), App(second.node()))
            nursery.start_soon(freeze_soon, net, N2)
            answer = await passer(ASKED, Client(), digest="", deadline_s=60.0)
            nursery.cancel_scope.cancel()
        assert answer is not None
        assert b'"text":"y"' in answer.body
        return trio.current_time() - began

    took_s = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert 1.5 < took_s < 2.0
    left_s = second.chain.requests[0].deadline_s
    assert left_s is not None
    assert 58.0 < left_s < 58.6


async def freeze_soon(net: FakeNet, node: NodeId) -> None:
    await trio.sleep(0.1)
    net.freeze(node)


async def kill_soon(net: FakeNet, node: NodeId) -> None:
    await trio.sleep(0.1)
    net.kill(node)


async def in_peace(_net: FakeNet, _node: NodeId) -> None:
    """Nothing happens to it."""


@pytest.mark.parametrize(
    ("path", "happens", "code"),
    [
        ("/chain", kill_soon, "not_ready"),
        ("/v1/completions", kill_soon, "not_ready"),
        ("/chain", freeze_soon, "not_ready"),
        ("/chain", in_peace, "deadline_exceeded"),
    ],
)
def test_a_stream_that_was_begun_ends_with_an_event_that_says_why(
    path: str, happens: Callable[[FakeNet, NodeId], Awaitable[None]], code: str
) -> None:
    """As one does that the asked node owns. Another entry would begin anew, so it is the client who goes on there."""
    first, second = Rig(FakeChain(IDS, hold_at=3)), Rig(FakeChain(IDS))
    answer = over_http(first, second, path, happens, deadline_ms=2500)
    (*events, last) = [json.loads(event) for event in re.findall(rb"data: (.*)\n\n", answer)]
    assert last["error"]["code"] == code
    assert not any("error" in event for event in events)
    assert b"[DONE]" not in answer
    assert answer.endswith(b"\r\n0\r\n\r\n")
    assert not second.chain.requests


def test_what_the_entry_says_of_its_own_failure_is_passed_on_whole() -> None:
    first = Rig(FakeChain(IDS, error=StageUnavailable([LayerRange(15, 30)]), error_at=3))
    answer = over_http(first, Rig(), "/chain", in_peace)
    (*_, tokens, last) = [json.loads(event) for event in re.findall(rb"data: (.*)\n\n", answer)]
    assert "tokens" in tokens
    assert last["error"]["missing"] == [[15, 30]]


class Gone:
    """A stream whose other end went as the answer began."""

    async def send(self, _message: Message) -> None:
        raise LinkLost("reset")

    async def receive(self) -> Message | None:
        await trio.sleep_forever()


def test_that_the_asked_node_is_gone_is_no_fault_of_the_entry() -> None:
    head = {"method": "POST", "path": "/chain", "id": "r1", "tenant": "", "headers": {}}
    asked = Message("http", head, b'{"prompt": "hi", "max_tokens": 9, "stream": true}')
    with pytest.raises(LinkLost):
        trio.run(take_over, App(Rig(FakeChain(IDS)).node()), N1, asked, cast(Stream, Gone()))


def over_http(
    first: Rig, second: Rig, path: str, happens: Callable[[FakeNet, NodeId], Awaitable[None]], **more: int
) -> bytes:
    """All that a client of an entry without layers is sent, while something happens to the one that is asked first."""
    body = json.dumps({"prompt": "hi", "max_tokens": len(IDS), "stream": True, **more})
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"

    async def main() -> bytes:
        net = FakeNet()
        asked = App(Rig(text=None, pass_on=Passer(net.join(N1), lambda: ROOM)).node())
        server = HttpServer(asked, await listen([Endpoint("127.0.0.1", 0)]))
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            nursery.start_soon(serve, net.join(N2), App(first.node()))
            nursery.start_soon(serve, net.join(N3), App(second.node()))
            nursery.start_soon(happens, net, N2)
            with trio.fail_after(10):
                async with await trio.open_tcp_stream("127.0.0.1", server.endpoints[0].port) as stream:
                    await stream.send_all((head + body).encode())
                    answer = b"".join([part async for part in stream])
            nursery.cancel_scope.cancel()
        return answer

    return trio.run(main)


@pytest.mark.parametrize("deadline_s", [0.2, 1.0, 4.0])
def test_the_client_is_told_in_time_when_nobody_answers(deadline_s: float) -> None:
    async def main() -> float:
        net = FakeNet()
        passer = Passer(net.join(N1), lambda: ROOM)
        net.join(N2)
        net.join(N3)  # live, and both keep silent about the request
        began = trio.current_time()
        with pytest.raises(DeadlineExceeded, match="no entry of this room"):
            await passer(ASKED, Client(), digest="", deadline_s=deadline_s)
        return trio.current_time() - began

    took_s = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert deadline_s <= took_s < deadline_s + 0.5
