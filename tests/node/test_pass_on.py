"""Whom a node lets answer in its place."""

from __future__ import annotations

import pytest
import trio

from meshd.api.message import Headers, Request
from meshd.directory import Directory
from meshd.errors import LinkLost, NotReady, PeerError, WrongPeer
from meshd.links.wire import Link
from meshd.node.pass_on import Passer, entries
from meshd.vocabulary import NodeId
from tests.api.rig import member
from tests.fakes.chain import N1, N2


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
