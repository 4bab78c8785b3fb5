"""What a node shows its elector of the room, and what it says of itself."""

from __future__ import annotations

from meshd.directory import Directory, Member
from meshd.node.electing import taking_part
from meshd.vocabulary import NodeStatus
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
