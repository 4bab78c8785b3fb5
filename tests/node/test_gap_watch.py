"""The alarm when layers lose their last replica."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest

from meshd.directory import Directory, Member
from meshd.eventlog import EventLog
from meshd.models.hash_model import parse_hash_model
from meshd.node.gap_watch import GapWatch
from meshd.vocabulary import Advert, Endpoint, LayerRange, NodeId, NodeStatus

ME, A, B = (NodeId(c * 32) for c in "0ab")
SPEC = parse_hash_model("hash:12").spec


def member(node: NodeId, layers: LayerRange, state: NodeStatus = NodeStatus.ALIVE) -> Member:
    advert = Advert(node, "n", 1, 0, (Endpoint("127.0.0.1", 1),), digest=SPEC.digest, num_layers=12, layers=layers)
    return Member(advert, state, admitted=True)


class Room:
    """What a watch says of one directory after the other."""

    def __init__(self) -> None:
        self._out = io.StringIO()
        self._watch = GapWatch(EventLog(ME, "me", form="json", out=self._out))
        self._directory = Directory(ME)

    def stop(self) -> None:
        self._watch.stop()

    def after(self, *members: Member, spec: Any = SPEC) -> list[tuple[str, Any]]:
        self._directory = self._directory.replace(list(members))
        seen = self._out.tell()
        self._watch.look(self._directory, spec)
        self._out.seek(seen)
        events = [json.loads(line) for line in self._out.read().splitlines()]
        return [(event["ev"], event.get("missing")) for event in events]


FIRST, SECOND = member(A, LayerRange(0, 6)), member(B, LayerRange(6, 12))


def test_a_lost_range_is_told_once_and_its_return_too() -> None:
    room = Room()
    assert room.after(FIRST, SECOND) == []
    assert room.after(FIRST, replace(SECOND, state=NodeStatus.DEAD)) == [("gap_critical", [[6, 12]])]
    assert room.after(FIRST) == []
    assert room.after() == [("gap_critical", [[0, 12]])]
    assert room.after(FIRST) == [("gap_critical", [[6, 12]])]
    assert room.after(FIRST, SECOND) == [("covered", None)]


def test_who_leaves_raises_no_alarm_about_itself() -> None:
    room = Room()
    room.after(FIRST, SECOND)
    room.stop()
    assert room.after(FIRST) == []


def test_a_room_that_forms_and_an_observer_of_no_model_alarm_nobody() -> None:
    room = Room()
    assert room.after(FIRST) == []
    assert room.after(FIRST, SECOND, spec=None) == []
    assert room.after(spec=None) == []


@pytest.mark.parametrize("state", [NodeStatus.SUSPECT, NodeStatus.ALIVE])
def test_a_suspect_still_counts(state: NodeStatus) -> None:
    room = Room()
    room.after(FIRST, SECOND)
    assert room.after(FIRST, replace(SECOND, state=state)) == []
