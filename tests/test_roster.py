"""The roster: sources joined into one directory."""

from __future__ import annotations

from dataclasses import replace

from meshd.directory import Member
from meshd.roster import Roster
from meshd.vocabulary import Advert, Endpoint, Health, LayerRange, NodeId, NodeStatus

ME, A, B = (NodeId(c * 32) for c in "0ab")


def advert(node: NodeId, name: str = "n", **more: object) -> Advert:
    base = Advert(node, name, 1, 0, (Endpoint("127.0.0.1", 1),), digest="d", num_layers=4, layers=LayerRange(0, 4))
    return replace(base, **more)  # type: ignore[arg-type]  # test shorthand


def test_gossip_decides_life_and_the_newest_advert_decides_the_rest() -> None:
    roster = Roster(ME)
    roster.set_gossip([Member(advert(A), NodeStatus.SUSPECT)])
    roster.heard(advert(A, incarnation=3, layers=LayerRange(0, 2)), via="next")
    member = roster.build().members[A]
    assert (member.state, member.advert.layers) == (NodeStatus.SUSPECT, LayerRange(0, 2))


def test_a_restart_replaces_the_old_run_whatever_brings_the_word() -> None:
    roster = Roster(ME)
    roster.heard(advert(A, epoch=2, incarnation=0, addresses=(Endpoint("127.0.0.22", 1),)), via="next")
    roster.heard(advert(A, epoch=1, incarnation=9), via="hello")
    assert roster.build().members[A].advert.epoch == 2


def test_link_known_nodes_follow_their_link() -> None:
    roster = Roster(ME)
    source = Endpoint("127.0.0.2", 9)
    roster.heard(advert(A), via="next", source=source)
    assert roster.build().replicas(LayerRange(0, 4), "d")[0].node_id == A
    roster.link_lost(A)
    assert roster.build().members[A].state is NodeStatus.DEAD
    assert not roster.directory.replicas(LayerRange(0, 4), "d")
    roster.link_up(A, 0.3)
    assert roster.build().members[A].rtt_ms == 0.3
    assert roster.directory.replicas(LayerRange(0, 4), "d")
    assert roster.addresses(A) == [source, Endpoint("127.0.0.1", 1)]


def test_version_moves_with_routes_and_not_with_health() -> None:
    roster = Roster(ME)
    roster.set_self(advert(ME), Health(), proven=True)
    first = roster.build().version
    roster.set_self(advert(ME), Health(load1=3), proven=True)
    assert roster.build().version == first
    roster.set_self(advert(ME, generation=2), Health(), proven=True)
    assert roster.build().version == first + 1
    roster.heard(advert(B), via="next")
    assert roster.build().version == first + 2


def test_nobody_is_routed_to_without_a_verdict() -> None:
    verdicts: dict[NodeId, bool | None] = {A: None}
    roster = Roster(ME, lambda a: (verdicts[a.node_id], "why"))
    roster.heard(advert(A), via="next")
    assert not roster.build().replicas(LayerRange(0, 4), "d")
    verdicts[A] = False
    assert roster.build().members[A].admission == "why"
    verdicts[A] = True
    assert roster.build().replicas(LayerRange(0, 4), "d")


def test_two_nodes_with_one_name_are_told_apart_everywhere() -> None:
    roster = Roster(ME)
    roster.heard(advert(A, "pi"), via="next")
    roster.heard(advert(B, "pi"), via="next")
    directory = roster.build()
    assert directory.label(A) == "pi~aaaa"
    assert directory.find("pi") is None
    found = directory.find("pi~bbbb")
    assert found is not None
    assert found.node_id == B
