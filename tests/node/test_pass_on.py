"""Whom a node lets answer in its place."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import pytest
import trio

from meshd.api.app import App
from meshd.api.message import Headers, Request
from meshd.directory import Directory
from meshd.errors import Busy, LinkLost, MeshdError, NotReady, PeerError, StageUnavailable, WrongPeer
from meshd.links.wire import Link
from meshd.node.pass_on import Passer, entries, take_over
from meshd.vocabulary import LayerRange, NodeId
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
    assert [found.node_id for found in entries(room, "")] == ([N2] if trusted else [])


class Client:
    """Nothing has been said to it yet."""

    started = False

    async def start(self, status: int, headers: Headers) -> None: ...

    async def send(self, data: bytes) -> None: ...


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
        with pytest.raises(NotReady, match=problem.message):
            await passer(Request("POST", "/chain", body=b"{}"), Client(), digest="")

    trio.run(main)
    assert links.asked == [N2]


N3 = NodeId("3" * 32)
ROOM = Directory(N1).replace([member(N1, "n1", None), member(N2, "n2", (0, 30)), member(N3, "n3", (0, 30))])


def asked_of(first: Rig, second: Rig) -> tuple[int, bytes]:
    """What a client of an entry without layers is answered where ``first`` is asked first."""

    async def serve(links: FakeLinks, app: App) -> None:
        async with aclosing(cast(AsyncGenerator[Inbound], links.inbound())) as inbound:
            async for peer, message, stream in inbound:
                await take_over(app, peer, message, stream)

    async def main() -> tuple[int, bytes]:
        net = FakeNet()
        passer = Passer(net.join(N1), lambda: ROOM)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, net.join(N2), App(first.node()))
            nursery.start_soon(serve, net.join(N3), App(second.node()))
            with trio.fail_after(5):
                answer = await passer(Request("POST", "/chain", body=b'{"prompt": "hi"}'), Client(), digest="")
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
