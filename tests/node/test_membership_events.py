"""The event log names a member as everything else does."""

from __future__ import annotations

import io
from types import SimpleNamespace

from meshd.daemon import Daemon
from meshd.directory import Member
from meshd.eventlog import EventLog
from meshd.roster import Roster
from meshd.vocabulary import Advert, Health, NodeId

ME, FIRST, SECOND = (NodeId(digit * 32) for digit in "012")


def test_two_members_of_one_name_are_told_apart_in_the_event_that_makes_them_two() -> None:
    out = io.StringIO()
    members: list[Member] = []
    daemon = Daemon.__new__(Daemon)
    vars(daemon).update(
        roster=Roster(ME), gossip=SimpleNamespace(members=lambda: members), log=EventLog(ME, "n1", out=out)
    )
    daemon.roster.set_self(Advert(ME, "n1", 1, 0, ()), Health(), proven=False)
    for node in (FIRST, SECOND):
        members.append(Member(Advert(node, "mini", 1, 0, ())))
        daemon._on_membership("join", {"node": node, "name": "mini", "epoch": 1})
    daemon._on_membership("refute", {"node": ME, "name": "n1"})
    assert out.getvalue().splitlines() == ["join mini epoch=1", "join mini~2222 epoch=1", "refute n1"]
