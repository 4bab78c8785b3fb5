"""What a node shows its elector of the room, and what it says of itself."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import trio
import trio.testing

from meshd.directory import Directory, Member
from meshd.election.holds import HoldAnswer, hold_request_untrusted
from meshd.election.settings import Settings
from meshd.errors import LinkLost
from meshd.eventlog import EventLog
from meshd.inference.engine import Engine, EngineHealth
from meshd.inference.hash_engine import HashEngine
from meshd.inference.keeper import StageKeeper
from meshd.links.wire import Links, Message
from meshd.models.hash_model import parse_hash_model
from meshd.node.electing import HOLD, Electing, taking_part
from meshd.vocabulary import LayerRange, NodeId, NodeStatus
from tests.election.specs import advert, node


def test_who_is_never_asked_does_not_keep_a_range_from_others() -> None:
    room = Directory(node(1)).replace(
        [
            Member(advert(1, 200)),
            Member(advert(2, 200, (0, 15)), admitted=True),
            Member(advert(3, 200, (0, 15)), admitted=None),  # not probed yet: it will be
            Member(advert(4, 200, (15, 30)), admitted=False),
            Member(advert(5, 200, (15, 30)), admitted=True, state=NodeStatus.DEAD),
            Member(advert(7, 200, (15, 30)), incompatible="speaks wire 9"),
            Member(advert(6, 200, (15, 30)), admitted=True, state=NodeStatus.DRAINING),
        ]
    )
    assert [member.node_id for member in taking_part(room)] == [node(1), node(2), node(3)]


MODEL = parse_hash_model("hash:30,layer_mb=10")
LOW = LayerRange(0, 15)


class Nowhere:
    """Links to nobody."""

    async def get(self, _peer: NodeId) -> None:
        await trio.lowlevel.checkpoint()
        raise LinkLost("nobody is there")


class Mortal(HashEngine):
    """An engine that can be killed."""

    dead = False

    def health(self) -> EngineHealth:
        return replace(super().health(), alive=not self.dead, reason="killed" if self.dead else "")


def test_what_is_remembered_is_what_was_held_also_when_an_engine_dies_during_a_move() -> None:
    """15..30 is missing, so this node loads it beside the range that others have too, and in the midst of its engine dies."""
    written: list[LayerRange] = []
    waited: list[bool] = []
    started: list[Mortal] = []

    async def start(layers: LayerRange, generation: int, progress: Callable[[str, float], None]) -> Engine:
        progress("fetching", 0.5)
        if started:
            await trio.sleep(20.0)
        started.append(Mortal(MODEL.spec, layers, generation=generation))
        return started[-1]

    def remember(layers: LayerRange) -> None:
        written.append(layers)
        waited.append(threading.current_thread() is threading.main_thread())

    never = threading.Event()

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            never.wait(0.001)  # the thread that writes lives in real time, which this clock would jump over
            await trio.sleep(0.1)

    async def main() -> None:
        keeper = StageKeeper(start, lambda: None)
        adverts = [advert(1, 700, digest=MODEL.digest)]
        adverts += [advert(n, 200, (0, 15), digest=MODEL.digest) for n in (2, 3)]
        tail = advert(4, 200, (15, 30), digest=MODEL.digest)
        rooms = [
            Directory(node(1)).replace([Member(a, admitted=True) for a in seen]) for seen in (adverts, [*adverts, tail])
        ]
        electing = Electing(
            node(1),
            MODEL.spec,
            Settings(lane_fraction=0.0, kv_reserve=0.7),
            epoch=1,
            pinned=None,
            resume=LOW,
            keeper=keeper,
            links=cast("Links", Nowhere()),
            directory=lambda: rooms[-1],
            log=EventLog(node(1), "n1", out=io.StringIO()),
            on_claim=lambda: None,
            remember=remember,
        )
        with trio.fail_after(600.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keeper.run)
                nursery.start_soon(electing.run)
                await until(lambda: keeper.held.layers == LOW)
                rooms.pop()
                await until(lambda: keeper.held.layers == LOW and keeper.held.loading is not None)
                await until(lambda: written == [LOW])
                started[0].dead = True
                await until(lambda: keeper.held.state == "ready" and keeper.held.layers != LOW)
                await until(lambda: written == [LOW, keeper.held.layers])
                nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not any(waited), "nobody waits for a disk in the event loop"


def test_a_promise_is_judged_by_the_room_as_it_is_when_it_comes() -> None:
    """15..30 was missing when the others were asked whether they stay; it has come back when they answer."""
    rooms: list[Directory] = []

    class Peer:
        """Every link, stream and node of the room: it promises, and meanwhile the missing range is back."""

        async def get(self, _peer: NodeId) -> Peer:
            await trio.lowlevel.checkpoint()
            return self

        async def open(self, message: Message) -> Peer:
            await trio.lowlevel.checkpoint()
            self.asked = hold_request_untrusted(message.head)
            return self

        async def receive(self) -> Message:
            await trio.lowlevel.checkpoint()
            rooms[:] = rooms[:1]
            return Message(HOLD, HoldAnswer(self.asked.ask_id, granted=True).wire())

        def cancel(self) -> None:
            """Nothing is under way."""

    async def start(layers: LayerRange, generation: int, progress: Callable[[str, float], None]) -> Engine:
        progress("fetching", 0.5)
        await trio.lowlevel.checkpoint()
        return HashEngine(MODEL.spec, layers, generation=generation)

    log = EventLog(node(1), "n1", out=io.StringIO())
    said: list[str] = []
    log.subscribe(lambda event: said.append(str(event.get("text", ""))))

    async def main() -> None:
        keeper = StageKeeper(start, lambda: None)
        adverts = [advert(1, 200, digest=MODEL.digest)]
        adverts.append(advert(2, 200, (0, 15), digest=MODEL.digest))
        whole = [*adverts, *(advert(n, 200, (15, 30), digest=MODEL.digest) for n in (3, 4))]
        rooms.append(Directory(node(1)).replace([Member(a, admitted=True) for a in whole]))
        electing = Electing(
            node(1),
            MODEL.spec,
            Settings(),
            epoch=1,
            pinned=None,
            resume=LOW,
            keeper=keeper,
            links=cast("Links", peer),
            directory=lambda: rooms[-1],
            log=log,
            on_claim=lambda: None,
            remember=lambda _layers: None,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            nursery.start_soon(electing.run)
            await trio.sleep(10.0)
            assert keeper.held.layers == LOW
            rooms.append(Directory(node(1)).replace([Member(a, admitted=True) for a in adverts]))
            await trio.sleep(120.0)
            assert keeper.held.layers == LOW
            nursery.cancel_scope.cancel()

    peer = Peer()
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert peer.asked.layers == LOW, "somebody was asked"
    assert [text for text in said if not text.startswith("claims")] == ["takes 0..15 (resume)"]
