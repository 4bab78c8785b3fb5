"""The roster: gossip and admission joined into one directory."""

from __future__ import annotations

from dataclasses import replace

from meshd.directory import Member
from meshd.roster import Roster
from meshd.vocabulary import Advert, Endpoint, Health, LayerRange, NodeId, NodeStatus

ME, A, B = (NodeId(c * 32) for c in "0ab")
WHOLE = LayerRange(0, 4)


def advert(node: NodeId, name: str = "n", **more: object) -> Advert:
    base = Advert(node, name, 1, 0, (Endpoint("127.0.0.1", 1),), digest="d", num_layers=4, layers=WHOLE)
    return replace(base, **more)  # type: ignore[arg-type]  # test shorthand


def test_version_moves_with_routes_and_not_with_health() -> None:
    roster = Roster(ME)
    roster.set_self(advert(ME), Health(), proven=True)
    first = roster.build().version
    roster.set_self(advert(ME), Health(load1=3), proven=True)
    assert roster.build().version == first
    roster.set_self(advert(ME, generation=2), Health(), proven=True)
    assert roster.build().version == first + 1
    roster.set_peers([Member(advert(B)), Member(advert(ME))])
    assert roster.build().version == first + 2
    assert [m.node_id for m in roster.directory.peers] == [B]
    roster.set_peers([Member(advert(B), NodeStatus.SUSPECT)])
    assert roster.build().version == first + 3


def test_nobody_is_routed_to_without_a_verdict() -> None:
    verdicts: dict[NodeId, bool | None] = {A: None}
    roster = Roster(ME, lambda a: (verdicts[a.node_id], "why"))
    roster.set_peers([Member(advert(A))])
    assert not roster.build().replicas(WHOLE, "d")
    verdicts[A] = False
    assert roster.build().members[A].admission == "why"
    verdicts[A] = True
    assert roster.build().replicas(WHOLE, "d")


def test_nothing_is_built_on_who_is_barred() -> None:
    """It has the mesh key and goes on saying that it lives; but no link to it can be made."""
    barred = set[NodeId]()
    roster = Roster(ME, barred=lambda: barred)
    roster.set_peers([Member(advert(A))])
    before = roster.build()
    assert before.replicas(WHOLE, "d")
    barred.add(A)
    after = roster.build()
    assert not after.replicas(WHOLE, "d")
    assert not after.members[A].proven(judged=False)
    assert after.version > before.version


def test_this_node_counts_once_it_has_proven_itself() -> None:
    roster = Roster(ME)
    roster.set_self(advert(ME), Health(), proven=False)
    assert not roster.build().holders("d")
    roster.set_self(advert(ME), Health(), proven=True)
    assert roster.build().holders("d")
    roster.set_self(advert(ME, draining=True), Health(), proven=True)
    assert not roster.build().holders("d")


def test_where_packets_come_from_is_tried_first() -> None:
    roster = Roster(ME)
    source = Endpoint("127.0.0.9", 2)
    roster.set_peers([Member(advert(A), source=source), Member(advert(B))])
    roster.build()
    assert roster.addresses(A) == [source, Endpoint("127.0.0.1", 1)]
    assert roster.addresses(B) == [Endpoint("127.0.0.1", 1)]
    assert roster.addresses(NodeId("c" * 32)) == []


def test_two_nodes_with_one_name_are_told_apart_everywhere() -> None:
    roster = Roster(ME)
    roster.set_peers([Member(advert(A, "pi")), Member(advert(B, "pi"))])
    directory = roster.build()
    assert directory.label(A) == "pi~aaaa"
    assert directory.find("pi") is None
    found = directory.find("pi~bbbb")
    assert found is not None
    assert found.node_id == B


def test_measured_against_claimed_speed_is_shown() -> None:
    roster = Roster(ME)
    roster.set_peers([Member(advert(A))])
    roster.set_claim_ratio(advert(A), 0.1)
    assert roster.build().members[A].claim_ratio == 0.1
    roster.set_claim_ratio(advert(A), None)
    assert roster.build().members[A].claim_ratio is None


def test_what_one_run_claimed_is_not_held_against_the_next() -> None:
    for again in (advert(A, generation=1), advert(A, epoch=2)):
        roster = Roster(ME)
        roster.set_peers([Member(advert(A))])
        roster.set_claim_ratio(advert(A), 0.1)
        roster.set_peers([Member(again)])
        assert roster.build().members[A].claim_ratio is None


def test_claims_of_who_left_are_forgotten() -> None:
    roster = Roster(ME)
    roster.set_peers([Member(advert(A))])
    roster.set_claim_ratio(advert(A), 0.1)
    roster.set_peers([Member(advert(B))])
    roster.set_peers([Member(advert(A))])
    assert roster.build().members[A].claim_ratio is None
