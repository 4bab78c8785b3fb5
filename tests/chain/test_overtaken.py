"""Losses that follow each other: an earlier route that is all that is left after a later one through the same hop was lost, a
hop that is lost while another's layers are waited for. No clock, no links."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshd.chain.effects import Fail, Send, Watch
from meshd.chain.effects import SessionEffect as Effect
from meshd.chain.messages import Lost, Step, Why
from meshd.chain.request import GenerationRequest
from meshd.chain.session import Session
from meshd.errors import StageUnavailable
from meshd.vocabulary import Hop, LayerRange, NodeId, Route, SessionId

E, A1, A2, B1, B2 = (NodeId(letter * 32) for letter in "e12ab")
FIRST, LAST = LayerRange(0, 6), LayerRange(6, 12)
HOLDERS = {FIRST: (A1, A2), LAST: (B1, B2)}


class Holders:
    """`recovery.Replicas` of a room that changes only where a test has it do so."""

    def __init__(self) -> None:
        self.holders: dict[LayerRange, tuple[NodeId, ...]] = dict(HOLDERS)
        self.proving: set[LayerRange] = set()

    def replace(self, layers: LayerRange, *, avoid: Collection[NodeId], arith: str, now: float) -> Route | None:
        return next(((Hop(node, layers),) for node in self.holders.get(layers, ()) if node not in avoid), None)

    def pending(self, layers: LayerRange) -> bool:
        return layers in self.proving

    def arith(self, node: NodeId) -> str:
        return "same"

    def stamp(self, node: NodeId) -> tuple[int, int] | None:
        return 1, 1

    def draining(self, node: NodeId) -> bool:
        return False

    def expected_s(self, route: Route, rows: int) -> float:
        return 0.0

    def penalise(self, node: NodeId, *, reporter: NodeId, now: float) -> None: ...


class Entry:
    """A session and what it did last."""

    def __init__(self) -> None:
        route = (Hop(A1, FIRST), Hop(B1, LAST))
        request = GenerationRequest(prompt=(1, 2, 3), max_tokens=8)
        self.room = Holders()
        self.core = Session(
            SessionId("5" * 32), E, request, digest="d", num_layers=12, route=route, replicas=self.room, now=0.0
        )
        self.tickets: dict[NodeId, int] = {}
        self.effects: list[Effect] = []
        self.did(self.core.start(0.0))

    def did(self, effects: Sequence[Effect]) -> None:
        self.effects = list(effects)
        self.tickets |= {effect.node: effect.ticket for effect in effects if isinstance(effect, Watch)}

    def watch_ends(self, node: NodeId, why: Why) -> None:
        self.did(self.core.unreachable(node, why, 0.1, ticket=self.tickets[node]))

    def told(self, by: NodeId, lost: NodeId, attempt: int) -> None:
        self.did(self.core.receive(Lost(self.core.session, attempt, lost, LAST, Why.REFUSED), by, 0.1))

    @property
    def sent(self) -> list[tuple[NodeId, int]]:
        """Steps: to whom, as which attempt."""
        found = [(effect.to, effect.message) for effect in self.effects if isinstance(effect, Send)]
        return [(to, message.attempt) for to, message in found if isinstance(message, Step)]


def both_of_the_last_layers_die(entry: Entry) -> None:
    """As seen by this entry and by the first hop, until another first hop is asked."""
    entry.watch_ends(B1, Why.RESET)
    entry.watch_ends(B2, Why.RESET)
    entry.told(A1, B1, 3)
    entry.told(A1, B2, 4)
    assert entry.sent == [(A2, 5)], "two who cannot reach a node are right"


def test_a_hop_that_went_on_to_a_later_attempt_is_asked_anew_about_the_earlier() -> None:
    """Here the answer hung until its deadline: A2 had dropped attempt 5 for 6 and never said that B2 was not there either."""
    entry = Entry()
    both_of_the_last_layers_die(entry)
    entry.watch_ends(B2, Why.REFUSED)
    assert entry.sent == [(A2, 6)], "beside it, by B1"
    entry.told(A2, B1, 6)
    assert entry.sent == [(A2, 7)], "the earlier route again, under a number that A2 will speak of"
    assert [hop.node_id for hop in entry.core.route] == [A2, B2]
    entry.told(A2, B2, 7)
    (failed,) = [effect for effect in entry.effects if isinstance(effect, Fail)]
    assert isinstance(failed.error, StageUnavailable)
    assert list(failed.error.missing) == [LAST]


def test_a_route_that_is_only_slow_is_left_to_go_on() -> None:
    """Nobody refused it: sent again it would begin anew where it is slow."""
    entry = Entry()
    both_of_the_last_layers_die(entry)
    for _ in range(20):
        now = entry.core.deadline()
        entry.core.heard(A2, now)
        entry.did(entry.core.tick(now))
        if entry.sent:
            break
    assert entry.sent == [(A2, 6)], "beside it, by B1"
    entry.told(A2, B1, 6)
    assert entry.sent == []
    assert not entry.core.over


def test_a_hop_that_is_lost_while_others_layers_are_waited_for_is_not_asked_afterwards() -> None:
    entry = Entry()
    entry.room.holders[LAST] = (B1,)
    entry.room.proving = {LAST}
    entry.watch_ends(B1, Why.RESET)
    entry.watch_ends(B1, Why.RESET)
    assert entry.effects == [], "somebody is about to hold those layers"
    entry.watch_ends(A1, Why.RESET)
    assert entry.effects == []
    entry.room.holders[LAST] = (B1, B2)
    entry.did(entry.core.tick(entry.core.deadline()))
    assert [hop.node_id for hop in entry.core.route] == [A2, B2]
    assert entry.sent == [(A2, 3)]
