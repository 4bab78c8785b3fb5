"""One core, or two, by hand: what it answers to which datagram."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgpack
import pytest

from meshd.errors import BadDatagram
from meshd.gossip import health_wire, statement, wire
from meshd.gossip.core import GossipCore
from meshd.gossip.effects import Changed, Check, Effect, Event, Exchange, Send
from meshd.gossip.limits import MAX_COUNT
from meshd.gossip.settings import GossipSettings
from meshd.gossip.wire import Accusation, Jam, Kind, Word
from meshd.vocabulary import Advert, Endpoint, Health, LayerRange, Loading, NodeId, NodeStatus
from tests.gossip.world import ADVERT, HEALTH, stated
from tests.sim.gossip_net import endpoint, fake_sign, fake_verify, node_id

SETTINGS = GossipSettings()


def advert(i: int) -> Advert:
    return replace(ADVERT, node_id=node_id(i), name=f"n{i}", epoch=1, incarnation=0, addresses=(endpoint(i),))


def core(i: int = 0, now: float = 0.0, settings: GossipSettings = SETTINGS) -> GossipCore:
    return GossipCore(advert(i), settings, sign=fake_sign(node_id(i)), verify=fake_verify, rng=Random(i), now=now)


def word(i: int, *, incarnation: int = 0, epoch: int = 1) -> bytes:
    """A datagram of node ``i`` that says who it is."""
    said, blob = stated(replace(advert(i), incarnation=incarnation, epoch=epoch))
    return wire.assemble(Kind.NEWS, seq=0, digest=said.digest, rumours=[wire.pack_word(Word(said.encoded, blob))])


def accusing(accuser: int, subject: int, *, incarnation: int = 0, dead: bool = False) -> bytes:
    said, _ = stated(advert(accuser))
    rumour = wire.pack_accusation(Accusation(node_id(subject), 1, incarnation, node_id(accuser), dead=dead))
    return wire.assemble(Kind.NEWS, seq=0, digest=said.digest, rumours=[rumour])


def events(effects: list[Effect]) -> list[tuple[str, NodeId]]:
    return [(e.name, e.node) for e in effects if isinstance(e, Event)]


def sent(effects: list[Effect]) -> list[tuple[Endpoint, wire.Datagram]]:
    return [(e.to, wire.decode_untrusted(e.payload)) for e in effects if isinstance(e, Send)]


def met(*others: int) -> GossipCore:
    """Core 0 that knows the others."""
    c = core()
    for i in others:
        c.receive(word(i), node_id(i), endpoint(i), 0.1)
    return c


def test_a_tick_at_the_deadline_always_makes_progress() -> None:
    c = met(1, 2, 3)
    for _ in range(500):
        before = c.deadline()
        c.tick(before)
        assert c.deadline() > before


def test_a_lone_node_does_not_spin() -> None:
    """It has news (itself) and nobody to tell it to."""
    c = core()
    ticks = 0
    while c.deadline() < 20.0:
        c.tick(c.deadline())
        ticks += 1
    assert ticks < 100


def test_a_member_that_cannot_be_read_any_more_dies_of_silence() -> None:
    c = met(1, 2)
    c.receive(msgpack.packb({0: 9, 1: 1}), node_id(1), endpoint(1), 0.2)
    while c.deadline() < 60.0:
        now = c.deadline()
        c.tick(now)
        c.heard(node_id(2), now)
    assert c.state_of(node_id(1)) is NodeStatus.DEAD


def test_a_stranger_is_asked_who_it_is_and_then_known() -> None:
    c = core()
    said, _ = stated(advert(1))
    ping = wire.assemble(Kind.PING, seq=5, digest=said.digest)
    answers = sent(c.receive(ping, node_id(1), endpoint(1), 0.1))
    assert (endpoint(1), Kind.PULL) in [(to, d.kind) for to, d in answers]
    ack = next(d for _, d in answers if d.kind is Kind.ACK)
    assert ack.seq == 5
    assert any(isinstance(r, Word) for r in ack.rumours)
    assert c.members(0.1)[1:] == []
    assert events(c.receive(word(1), node_id(1), endpoint(1), 0.2)) == [("join", node_id(1))]
    (member,) = c.members(0.5)[1:]
    assert member.advert == advert(1)
    assert member.last_heard_s == pytest.approx(0.3)
    assert member.source == endpoint(1)


def test_relayed_facts_never_count_as_hearing() -> None:
    c = met(1)
    said, blob = stated(advert(2))
    relayed = wire.assemble(
        Kind.NEWS, seq=0, digest=stated(advert(1))[0].digest, rumours=[wire.pack_word(Word(said.encoded, blob))]
    )
    c.receive(relayed, node_id(1), endpoint(1), 1.0)
    member = next(m for m in c.members(9.0) if m.node_id == node_id(2))
    assert member.state is NodeStatus.ALIVE
    assert member.last_heard_s is None
    assert member.source is None


def test_a_forged_statement_changes_nothing_and_the_rest_is_read() -> None:
    c = met(1)
    real, blob = stated(replace(advert(2), epoch=9))
    forged = real.encoded[:-1] + bytes([real.encoded[-1] ^ 1])
    good, good_blob = stated(advert(3))
    both = [wire.pack_word(Word(forged, blob)), wire.pack_word(Word(good.encoded, good_blob))]
    datagram = wire.assemble(Kind.NEWS, seq=0, digest=stated(advert(1))[0].digest, rumours=both)
    c.receive(datagram, node_id(1), endpoint(1), 0.2)
    assert {m.advert.name for m in c.members(0.2)} == {"n0", "n1", "n3"}
    assert c.forged == 1


def test_an_accusation_of_ourselves_is_refuted_to_whoever_brought_it() -> None:
    c = met(1, 2)
    effects = c.receive(accusing(1, 0), node_id(1), endpoint(1), 1.0)
    assert events(effects) == [("refute", node_id(0))]
    assert c.advert.incarnation == 1
    (to, news) = next((to, d) for to, d in sent(effects) if d.kind is Kind.NEWS)
    assert to == endpoint(1)
    assert isinstance(news.rumours[0], Word)
    again = c.receive(accusing(1, 0), node_id(1), endpoint(1), 1.1)  # an old one: answered, not outbid
    assert c.advert.incarnation == 1
    assert sent(again)


def test_suspect_then_dead_then_back_with_a_higher_incarnation() -> None:
    c = met(1, 2, 3)
    assert events(c.receive(accusing(1, 2), node_id(1), endpoint(1), 1.0)) == [("suspect", node_id(2))]
    assert c.state_of(node_id(2)) is NodeStatus.SUSPECT
    assert events(c.receive(accusing(1, 2, dead=True), node_id(1), endpoint(1), 2.0)) == [("failed", node_id(2))]
    assert events(c.receive(word(2), node_id(2), endpoint(2), 3.0)) == []  # its old word does not lift it
    assert c.state_of(node_id(2)) is NodeStatus.DEAD
    assert events(c.receive(word(2, incarnation=1), node_id(2), endpoint(2), 3.1)) == [("join", node_id(2))]
    assert c.state_of(node_id(2)) is NodeStatus.ALIVE


def test_whoever_we_think_dead_is_told_at_once_when_it_speaks() -> None:
    c = met(1, 2, 3)
    c.receive(accusing(1, 2, dead=True), node_id(1), endpoint(1), 2.0)
    ping = wire.assemble(Kind.PING, seq=9, digest=stated(advert(2))[0].digest)
    told = [r for to, d in sent(c.receive(ping, node_id(2), endpoint(2), 3.0)) if to == endpoint(2) for r in d.rumours]
    assert Accusation(node_id(2), 1, 0, node_id(0), dead=True) in told


def test_a_lost_hop_is_a_suspicion_at_once_and_an_answered_one_is_a_sign_of_life() -> None:
    c = met(1, 2, 3)
    effects = c.lost(node_id(2), 1.0)
    assert events(effects) == [("suspect", node_id(2))]
    assert any(to == endpoint(2) for to, _ in sent(effects))
    c.heard(node_id(1), 5.0)
    assert next(m for m in c.members(5.5) if m.node_id == node_id(1)).last_heard_s == pytest.approx(0.5)


def test_an_unanswered_member_is_pinged_checked_asked_about_and_accused() -> None:
    c = met(1, 2, 3)
    kinds: list[Kind] = []
    checks = 0
    effects: list[Effect] = []
    while ("suspect",) not in [(name,) for name, _ in events(effects)]:
        effects = c.tick(c.deadline())
        kinds += [d.kind for _, d in sent(effects)]
        checks += sum(isinstance(e, Check) for e in effects)
        assert c.deadline() < 4
    assert kinds.count(Kind.PING) >= 4
    assert kinds.count(Kind.PING_REQ) >= 2
    assert checks >= 1


def test_a_tcp_answer_ends_a_probe_well() -> None:
    c = met(1)
    while c.deadline() < 30.0:
        now = c.deadline()
        for effect in c.tick(now):
            if isinstance(effect, Check):
                c.checked(effect.node, True, now)
    (member,) = c.members(30.0)[1:]
    assert member.state is NodeStatus.ALIVE
    assert member.one_way


def test_a_higher_epoch_replaces_the_run_at_once_and_its_address_with_it() -> None:
    """M14."""
    c = met(1, 2)
    moved = replace(advert(1), epoch=2, addresses=(endpoint(1, 7),))
    said, blob = stated(moved)
    news = wire.assemble(Kind.NEWS, seq=0, digest=said.digest, rumours=[wire.pack_word(Word(said.encoded, blob))])
    assert events(c.receive(news, node_id(1), endpoint(1, 7), 1.0)) == [("join", node_id(1))]
    assert c.addresses_of(node_id(1)) == (endpoint(1, 7),)
    c.receive(word(1), node_id(1), endpoint(1), 1.1)  # a late packet of the old run
    assert c.addresses_of(node_id(1)) == (endpoint(1, 7),)


def test_a_clone_is_shown_with_both_addresses_once_a_minute() -> None:
    c = met(1)
    (conflict,) = [e for e in c.cloned(endpoint(66), 1.0) if isinstance(e, Event)]
    assert conflict.name == "conflict"
    assert set(conflict.fields["addresses"]) == {str(endpoint(0)), str(endpoint(66))}
    assert events(c.cloned(endpoint(66), 2.0)) == []
    clone, blob = stated(replace(advert(0), name="clone"))
    said = stated(advert(1))[0]
    relayed = wire.assemble(Kind.NEWS, seq=0, digest=said.digest, rumours=[wire.pack_word(Word(clone.encoded, blob))])
    assert ("conflict", node_id(0)) in events(c.receive(relayed, node_id(1), endpoint(1), 70.0))
    assert c.advert.name == "n0"
    assert c.advert.incarnation == 1  # ours is the newer word again


def test_what_our_former_run_sent_to_this_address_is_no_clone() -> None:
    """A wiped device is still looked for under its old name, at the address that is ours again."""
    c = met(1)
    assert events(c.cloned(endpoint(0), 1.0)) == []
    assert ("conflict", node_id(0)) in events(c.cloned(endpoint(66), 1.1))


def test_a_peer_too_far_in_version_is_shown_and_not_talked_to() -> None:
    c = met(1)
    effects = c.receive(msgpack.packb({0: 9, 1: 1}), node_id(5), endpoint(5), 1.0)
    assert sent(effects) == []
    assert Changed() in effects
    shown = next(m for m in c.members(2.0) if m.node_id == node_id(5))
    assert shown.incompatible == "speaks wire version 9, this node 1"
    assert not shown.routable
    assert shown.last_heard_s == pytest.approx(1.0)
    assert all(m.node_id != node_id(5) for m in c.members(99.0))
    c.receive(msgpack.packb({0: 9, 1: 1}), node_id(1), endpoint(1), 3.0)  # a known one was upgraded too far
    assert next(m for m in c.members(3.0) if m.node_id == node_id(1)).incompatible


def test_what_cannot_be_read_changes_nothing() -> None:
    c = met(1)
    before = c.members(1.0)
    with pytest.raises(BadDatagram):
        c.receive(b"\x00garbage", node_id(1), endpoint(1), 1.0)
    assert c.members(1.0) == before


def test_progress_of_loading_is_told_at_most_every_two_seconds() -> None:
    c = met(1)
    loading = replace(advert(0), loading=Loading(LayerRange(0, 9), "fetching", 0.0))
    c.set_advert(loading, 1.0)
    told = c.advert.incarnation
    for tenth in range(1, 10):
        assert loading.loading is not None
        c.set_advert(replace(loading, loading=replace(loading.loading, progress=tenth / 10)), 1.0 + tenth / 10)
    assert c.advert.incarnation == told
    while c.deadline() <= 3.1:
        c.tick(c.deadline())
    assert c.advert.incarnation == told + 1
    assert c.advert.loading is not None
    assert c.advert.loading.progress == 0.9


def test_draining_and_leaving_are_told_to_everybody_directly() -> None:
    c = met(1, 2, 3)
    told = {to for to, _ in sent(c.set_advert(replace(advert(0), draining=True), 0.2))}
    assert told == {endpoint(1), endpoint(2), endpoint(3)}
    goodbye = sent(c.leave(0.3))
    assert {to for to, _ in goodbye} == told
    other = core(1)
    other.receive(word(0), node_id(0), endpoint(0), 0.1)
    payload = next(e.payload for e in c.leave(0.4) if isinstance(e, Send))
    assert events(other.receive(payload, node_id(0), endpoint(0), 0.5)) == [("left", node_id(0))]
    assert other.state_of(node_id(0)) is NodeStatus.LEFT


def test_a_jam_is_told_at_once_and_told_on() -> None:
    c, other = met(1), core(1)
    other.receive(word(0), node_id(0), endpoint(0), 0.1)
    c.set_health(HEALTH, 1.0)
    c.set_health(replace(HEALTH, jammed=True), 2.0)
    effects = c.tick(2.03)
    payload = next(e.payload for e in effects if isinstance(e, Send))
    told = other.receive(payload, node_id(0), endpoint(0), 2.04)
    assert Changed() in told
    assert next(m for m in other.members(2.1) if m.node_id == node_id(0)).health.jammed


def test_a_jam_that_comes_back_is_not_told_again() -> None:
    """Three cores, because nobody believes what it hears of itself."""
    cores = {endpoint(i): core(i) for i in range(3)}
    for i, one in enumerate(cores.values()):
        for other in {0, 1, 2} - {i}:
            one.receive(word(other), node_id(other), endpoint(other), 0.1)
    cores[endpoint(0)].set_health(replace(HEALTH, jammed=True), 0.2)
    told: list[float] = []
    for now in (0.2 + 0.05 * i for i in range(100)):
        effects = [(source, effect) for source, one in cores.items() for effect in one.tick(now)]
        while effects:
            source, effect = effects.pop()
            if isinstance(effect, Send):
                told += [now for rumour in wire.decode_untrusted(effect.payload).rumours if isinstance(rumour, Jam)]
                sender = cores[source].node_id
                answers = cores[effect.to].receive(effect.payload, sender, source, now)
                effects += [(effect.to, answer) for answer in answers]
    assert told
    assert max(told) < 3.0


def test_health_of_others_is_passed_on_with_its_age() -> None:
    c = met(1, 2)
    while c.deadline() < 1.0:
        c.tick(c.deadline())
    said = stated(advert(1))[0]
    record = health_wire.encode(node_id(1), HEALTH, 0.0)
    c.receive(wire.assemble(Kind.NEWS, seq=0, digest=said.digest, health=[record]), node_id(1), endpoint(1), 1.0)
    c.set_health(Health(), 1.0)
    passed = []
    while c.deadline() < 3.0:
        now = c.deadline()
        passed += [(now, h) for _, d in sent(c.tick(now)) for h in d.health if h.who == health_wire.who(node_id(1))]
    assert passed
    assert all(h.health == HEALTH for _, h in passed)
    assert all(now - 1.0 <= h.age_s + 1e-6 <= now - 0.89 for now, h in passed)


def test_a_pause_of_our_own_accuses_nobody_and_asks_first() -> None:
    """M18: what the others did not answer while we did not run says nothing about them."""
    c = met(1, 2, 3)
    c.receive(accusing(1, 2), node_id(1), endpoint(1), 0.5)
    effects = c.tick(61.0)
    assert ("pause", node_id(0)) in events(effects)
    assert not {name for name, _ in events(effects)} & {"suspect", "failed"}
    assert any(isinstance(e, Exchange) for e in effects)
    assert c.state_of(node_id(2)) is NodeStatus.SUSPECT


def test_two_tables_agree_after_one_exchange() -> None:
    a, b = met(1, 2, 3), core(7)
    b.receive(word(8), node_id(8), endpoint(8), 0.1)
    message: bytes | None = a.exchange_begin()
    rounds = 0
    while message is not None:
        answer, _ = b.exchange_serve(node_id(0), message, 1.0)
        assert answer is not None
        message, _ = a.exchange_reply(node_id(7), answer, 1.0)
        rounds += 1
    assert rounds == 2
    assert {m.node_id for m in a.members(1.0)} == {m.node_id for m in b.members(1.0)}
    answer, _ = b.exchange_serve(node_id(0), a.exchange_begin(), 2.0)
    assert answer is not None
    assert len(answer) < 8
    assert a.exchange_reply(node_id(7), answer, 2.0)[0] is None


@pytest.mark.parametrize("sleeper_calls", [True, False])
def test_a_device_that_slept_for_long_brings_back_nobody_it_has_not_heard_since(sleeper_calls: bool) -> None:
    """Node 1 went while it slept, and the room has forgotten it: to the room its statement would be a newcomer's."""
    sleeper, other = met(1, 2), core(2)
    other.receive(word(0), node_id(0), endpoint(0), 0.1)

    def exchange(now: float) -> None:
        caller, server = (sleeper, other) if sleeper_calls else (other, sleeper)
        message: bytes | None = caller.exchange_begin()
        while message is not None:
            answer, _ = server.exchange_serve(caller.node_id, message, now)
            assert answer is not None
            message, _ = caller.exchange_reply(server.node_id, answer, now)

    effects = sleeper.resumed(SETTINGS.tombstone_s, 10.0)
    effects += sleeper.tick(10.2)
    for effect in effects:
        if isinstance(effect, Send) and effect.to == endpoint(2):
            other.receive(effect.payload, node_id(0), endpoint(0), 10.2)
    exchange(11.0)
    assert other.state_of(node_id(1)) is None
    assert sleeper.state_of(node_id(1)) is NodeStatus.ALIVE
    sleeper.heard(node_id(1), 12.0)
    exchange(13.0)
    assert other.state_of(node_id(1)) is NodeStatus.ALIVE


def test_an_exchange_does_not_carry_deaths() -> None:
    a, b = met(1, 2, 3), core(4)
    for i in (0, 1, 2, 3):
        b.receive(word(i), node_id(i), endpoint(i), 0.1)
    a.receive(accusing(1, 2, dead=True), node_id(1), endpoint(1), 1.0)
    answer, _ = b.exchange_serve(node_id(0), a.exchange_begin(), 2.0)
    assert answer is not None
    news, _ = a.exchange_reply(node_id(4), answer, 2.0)
    if news is not None:
        b.exchange_serve(node_id(0), news, 2.0)
    assert b.state_of(node_id(2)) is NodeStatus.ALIVE
    assert a.state_of(node_id(2)) is NodeStatus.DEAD


def test_an_address_of_a_live_member_is_not_dialled_again() -> None:
    c = met(1)
    assert c.join([endpoint(1)], 0.2, via="hello") == []
    assert c.join([endpoint(2)], 0.2, via="hello") != []


def test_a_candidate_is_tried_until_it_answers_and_an_echo_is_not() -> None:
    c = core()
    effects = c.join([endpoint(1), endpoint(0)], 0.0)
    assert {to for to, d in sent(effects) if d.kind is Kind.PING} == {endpoint(0), endpoint(1)}
    assert [e.endpoints for e in effects if isinstance(e, Exchange)] == [(endpoint(1),), (endpoint(0),)]
    c.echo(endpoint(0))
    tried: list[Endpoint] = []
    while c.deadline() < 8.0:
        tried += [to for to, _ in sent(c.tick(c.deadline()))]
    assert set(tried) == {endpoint(1)}
    assert len(tried) >= 3
    c.receive(word(1), node_id(1), endpoint(1), 8.0)
    assert next(m for m in c.members(8.0) if m.node_id == node_id(1)).via == "join"


def test_an_address_that_was_ours_is_tried_again_once_we_have_others() -> None:
    c = core()
    c.join([endpoint(0)], 0.0)
    c.echo(endpoint(0))
    assert not [to for to, _ in sent(c.tick(c.deadline()))]
    c.set_advert(replace(c.advert, addresses=(endpoint(5),)), 1.0)
    tried: list[Endpoint] = []
    while c.deadline() < 8.0:
        tried += [to for to, _ in sent(c.tick(c.deadline()))]
    assert set(tried) == {endpoint(0)}


def test_progress_that_waited_is_newer_than_a_refutation() -> None:
    """Two statements of one incarnation would be a cloned device to whoever sees both, its owner first."""
    c = met(1)
    loading = replace(c.advert, loading=Loading(LayerRange(0, 8), "loading", 0.1))
    c.set_advert(loading, 1.0)
    c.set_advert(replace(loading, loading=Loading(LayerRange(0, 8), "loading", 0.5)), 1.1)  # waits for its time
    c.receive(accusing(1, 0, incarnation=c.advert.incarnation), node_id(1), endpoint(1), 1.2)
    refuted = c.advert
    while c.advert.loading is not None and c.advert.loading.progress < 0.5:
        c.tick(c.deadline())
    assert c.advert.incarnation > refuted.incarnation


def test_a_statement_counts_though_its_advert_cannot_be_read() -> None:
    """What its owner signed must not be believed by halves: one that left leaves the ring, and is forgotten in the end."""
    c = met(1, 2)
    blob = msgpack.packb({"n": "no name"})
    gone = statement.make(node_id(1), 1, 1, statement.short_hash(blob), left=True, sign=fake_sign(node_id(1)))
    news = wire.assemble(Kind.NEWS, seq=0, digest=gone.digest, rumours=[wire.pack_word(Word(gone.encoded, blob))])
    assert events(c.receive(news, node_id(1), endpoint(1), 1.0)) == [("left", node_id(1))]
    assert events(c.receive(news, node_id(1), endpoint(1), 1.1)) == []
    assert c.state_of(node_id(1)) is NodeStatus.LEFT
    assert c.live_peers == 1
    while c.deadline() < SETTINGS.tombstone_s + 2.0:
        now = c.deadline()
        told = [r for _, d in sent(c.tick(now)) for r in d.rumours if isinstance(r, Word)]
        assert all(r.advert is None for r in told if r.statement == gone.encoded)
        c.heard(node_id(2), now)
    assert c.state_of(node_id(1)) is None


@pytest.mark.parametrize("incarnation", [MAX_COUNT, MAX_COUNT - 1, MAX_COUNT // 2])
@pytest.mark.parametrize("dead", [False, True])
def test_nobody_is_accused_of_what_it_cannot_have_said(incarnation: int, dead: bool) -> None:
    """Its answer would be a number that nobody reads; and who believed the accusation would never hear a higher one."""
    victim, other = met(1), core(2)
    other.receive(word(0), node_id(0), endpoint(0), 0.1)
    accusation = accusing(1, 0, incarnation=incarnation, dead=dead)
    answers = sent(victim.receive(accusation, node_id(1), endpoint(1), 1.0))
    assert victim.advert.incarnation == 0
    assert any(isinstance(r, Word) for _, d in answers for r in d.rumours)
    other.receive(accusation, node_id(1), endpoint(1), 1.0)
    assert other.state_of(node_id(0)) is NodeStatus.ALIVE


def test_who_was_driven_high_can_still_be_accused_and_answers() -> None:
    victim, other = met(1), core(2)
    other.receive(word(0), node_id(0), endpoint(0), 0.1)
    for _ in range(3):
        high = max(MAX_COUNT // 2 - 1, victim.advert.incarnation)
        accusation = accusing(1, 0, incarnation=high)
        other.receive(accusation, node_id(1), endpoint(1), 1.0)
        assert other.state_of(node_id(0)) is NodeStatus.SUSPECT
        victim.receive(accusation, node_id(1), endpoint(1), 1.0)
        assert victim.advert.incarnation == high + 1
        other.receive(word(0, incarnation=high + 1), node_id(0), endpoint(0), 1.1)
        assert other.state_of(node_id(0)) is NodeStatus.ALIVE


def test_an_address_at_which_a_live_member_answered_is_tried_no_more() -> None:
    """It may answer where it does not say that it is: behind a forwarded port, through a tunnel."""
    alias = Endpoint("203.0.113.5", 9000)

    def tried(c: GossipCore, start: int, end: int, *, alive: bool) -> bool:
        effects: list[Effect] = []
        for second in range(start, end):
            effects += c.heard(node_id(1), float(second)) if alive else []
            effects += c.tick(float(second))
        return any(isinstance(e, Exchange) and e.endpoints == (alias,) for e in effects)

    c = met(1)
    assert Exchange(None, (alias,)) in c.join([alias], 1.0)
    assert tried(c, 1, 100, alive=True)
    c.met(alias, node_id(1))
    assert not tried(c, 100, 200, alive=True)
    assert tried(c, 200, 300, alive=False)
