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
from meshd.election.settings import Settings
from meshd.eventlog import EventLog
from meshd.inference.engine import Engine, EngineHealth
from meshd.inference.hash_engine import HashEngine
from meshd.inference.keeper import StageKeeper
from meshd.links.wire import Links
from meshd.models.hash_model import parse_hash_model
from meshd.node.electing import Electing, taking_part
from meshd.vocabulary import LayerRange, NodeStatus
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

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
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
            links=cast("Links", None),  # nobody is asked
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
