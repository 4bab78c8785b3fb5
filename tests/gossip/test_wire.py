"""What travels: round trips, sizes, versions, and bytes from strangers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.errors import BadDatagram
from meshd.gossip import advert_wire, exchange, health_wire, statement, wire
from meshd.gossip.exchange import Entry, Message, Step
from meshd.gossip.limits import PAYLOAD_BYTES, SEAL_BYTES
from meshd.gossip.wire import Accusation, Datagram, Jam, Kind, Word
from meshd.identity.sealed import MAX_DATAGRAM_BYTES, OVERHEAD_BYTES
from meshd.vocabulary import Advert, Endpoint, Health
from tests.gossip.world import ADVERT, HEALTH, ME, OTHER, THIRD, adverts, healths, stated
from tests.sim.gossip_net import fake_verify

FIXTURES = Path(__file__).parent / "fixtures"


def payload() -> bytes:
    """A ping with one of everything."""
    said, blob = stated(ADVERT)
    record = health_wire.encode(OTHER, HEALTH, 1.5)
    return wire.assemble(
        Kind.PING,
        seq=77,
        digest=said.digest,
        rumours=[
            wire.pack_word(Word(said.encoded, blob)),
            wire.pack_accusation(Accusation(THIRD, 2, 9, ME)),
            wire.pack_accusation(Accusation(THIRD, 2, 9, OTHER, dead=True)),
            wire.pack_jam(record),
        ],
        health=[record],
        subject=THIRD,
        wants=[OTHER, ME],
        round_=300,
    )


def expected() -> Datagram:
    said, blob = stated(ADVERT)
    record = health_wire.HealthRecord(health_wire.who(OTHER), 1.5, HEALTH)
    return Datagram(
        1,
        Kind.PING,
        77,
        said.digest,
        (
            Word(said.encoded, blob),
            Accusation(THIRD, 2, 9, ME),
            Accusation(THIRD, 2, 9, OTHER, dead=True),
            Jam(record),
        ),
        (record,),
        THIRD,
        (OTHER, ME),
        300,
    )


def test_a_datagram_comes_back_as_it_was() -> None:
    assert wire.decode_untrusted(payload()) == expected()


def test_the_seal_fits_beside_the_largest_payload() -> None:
    assert OVERHEAD_BYTES <= SEAL_BYTES
    assert PAYLOAD_BYTES + OVERHEAD_BYTES <= MAX_DATAGRAM_BYTES


def test_recorded_frames_of_this_version_are_still_read() -> None:
    """The files were written by the first version; a later one must read them as they are."""
    assert wire.decode_untrusted((FIXTURES / "wire1_ping.bin").read_bytes()) == expected()
    said, blob = stated(ADVERT)
    assert (FIXTURES / "wire1_statement.bin").read_bytes() == said.encoded
    read, body, signature = statement.read_untrusted((FIXTURES / "wire1_statement.bin").read_bytes())
    assert read == said
    assert fake_verify(OTHER, body, signature)
    assert advert_wire.decode_untrusted((FIXTURES / "wire1_advert.bin").read_bytes(), OTHER, 3, 2) == ADVERT
    news = exchange.decode_untrusted((FIXTURES / "wire1_exchange.bin").read_bytes(), ME)
    assert news == Message(
        Step.NEWS, (Word(said.encoded, blob),), b"", (Entry(THIRD, (4, 5)),), (Accusation(THIRD, 4, 5, ME),), (ME,)
    )


def test_a_newer_version_may_add_keys_entries_kinds_and_rumours() -> None:
    m = msgpack.unpackb(payload(), strict_map_key=False)
    m[0] = 2
    m[40] = "something new"
    m[4] = [[*m[4][0], "more"], [99, "an unknown rumour"], *m[4][1:]]
    m[5] = [[*m[5][0], 1, 2, 3]]
    read = wire.decode_untrusted(msgpack.packb(m))
    assert replace(read, wire=1) == expected()
    assert wire.decode_untrusted(msgpack.packb({0: 2, 1: 60})).kind is Kind.NONE


def test_missing_keys_have_defaults() -> None:
    assert wire.decode_untrusted(msgpack.packb({0: 1})) == Datagram(1, Kind.NONE)
    advert = advert_wire.decode_untrusted(msgpack.packb({"n": "x"}), OTHER, 1, 0)
    assert advert == Advert(OTHER, "x", 1, 0, ())
    record = health_wire.decode_untrusted([health_wire.who(OTHER), 0])
    assert record.health == Health()


def test_of_a_version_further_away_only_the_version_is_read() -> None:
    assert wire.decode_untrusted(msgpack.packb({0: 7, 1: ["not", "a", "kind"]})) == Datagram(7, Kind.NONE)
    assert [v for v in range(10) if wire.understands(v)] == [0, 1, 2]


@settings(max_examples=40)
@given(adverts)
def test_an_advert_always_fits_and_loses_only_its_tail(advert: Advert) -> None:
    blob = advert_wire.encode(advert)
    assert len(blob) <= advert_wire.ADVERT_BYTES
    read = advert_wire.decode_untrusted(blob, advert.node_id, advert.epoch, advert.incarnation)
    models = read.capability.models
    assert read.addresses == advert.addresses[: len(read.addresses)]
    assert models == advert.capability.models[: len(models)]
    kept = replace(
        advert, addresses=read.addresses, http=read.http, capability=replace(advert.capability, models=models)
    )
    assert read == kept


def test_twelve_interfaces_of_both_families_fit_one_datagram() -> None:
    """D09: an advert never outgrows the packet it must travel in."""
    many = tuple(Endpoint(f"10.{i}.0.2", 8091) for i in range(12)) + tuple(
        Endpoint(f"2001:db8:{i:x}::1234:5678:9abc:def0", 8091) for i in range(12)
    )
    advert = replace(
        ADVERT,
        addresses=many,
        name="n" * 64,
        model="o" * 100 + "/" + "m" * 99,
        capability=replace(ADVERT.capability, models=tuple(f"{i:064x}" for i in range(40))),
    )
    said, blob = stated(advert)
    packed = wire.assemble(
        Kind.PING, seq=1 << 40, digest=said.digest, rumours=[wire.pack_word(Word(said.encoded, blob))], round_=65535
    )
    assert len(packed) <= PAYLOAD_BYTES
    read = advert_wire.decode_untrusted(blob, OTHER, 1, 1)
    assert len(read.addresses) >= 12


@given(healths, st.floats(0, 20))
def test_health_comes_back_and_only_grows_older(health: Health, age_s: float) -> None:
    packed = health_wire.encode(OTHER, health, age_s)
    record = health_wire.decode_untrusted(msgpack.unpackb(packed))
    assert record.health == health
    assert record.who == health_wire.who(OTHER)
    assert age_s - 1e-6 <= record.age_s <= age_s + 0.1


def test_a_usual_health_record_is_short() -> None:
    assert len(health_wire.encode(OTHER, HEALTH, 1.5)) <= 46


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-5, 1 << 50)
        | st.binary(max_size=20)
        | st.text(max_size=5)
        | st.floats(),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.integers(0, 9), inner, max_size=8),
        max_leaves=30,
    ).map(msgpack.packb)
)
def test_bytes_of_strangers_raise_bad_datagram_only(data: bytes) -> None:
    for read in (
        wire.decode_untrusted,
        lambda d: advert_wire.decode_untrusted(d, OTHER, 1, 1),
        lambda d: exchange.decode_untrusted(d, OTHER),
        statement.read_untrusted,
    ):
        with contextlib.suppress(BadDatagram):
            read(data)


@given(st.integers(0, 500), st.integers(0, 255))
def test_a_changed_byte_raises_bad_datagram_only(place: int, value: int) -> None:
    data = bytearray(payload())
    data[place % len(data)] = value
    with contextlib.suppress(BadDatagram):
        wire.decode_untrusted(bytes(data))


def test_too_long_and_too_deep_are_refused_before_they_are_read() -> None:
    with pytest.raises(BadDatagram):
        wire.decode_untrusted(bytes(PAYLOAD_BYTES + 1))
    with pytest.raises(BadDatagram):
        wire.decode_untrusted(b"\x91" * 1000 + b"\x00")
    with pytest.raises(BadDatagram):
        wire.decode_untrusted(b"\xdf\xff\xff\xff\xff")
