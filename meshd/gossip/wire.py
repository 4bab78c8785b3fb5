"""The datagram: a small msgpack map with whole-number keys, at most `PAYLOAD_BYTES`, sealed by somebody else.

======  =========  ==========================================================================
key     in         meaning
======  =========  ==========================================================================
0       all        wire version of the sender
1       all        kind
2       all        sequence number of the ping it is or answers; 0 = none
3       all        digest of the sender's newest statement
4       any        rumours (statements, adverts, accusations, jams)
5       any        health records: the sender's first, then the freshest it knows of others
6       relayed    whom a PING_REQ, RELAYED or NACK is about (16 bytes)
7       PULL       ids whose newest statement and advert the sender wants
8       PING       the round of the ring its sender is in
======  =========  ==========================================================================

Unknown keys, kinds and rumours are ignored and missing keys have defaults, so versions N and N-1 talk. Of a datagram of a
version further away only the version is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import msgpack

from meshd.errors import BadDatagram
from meshd.gossip import health_wire
from meshd.gossip.advert_wire import ADVERT_BYTES
from meshd.gossip.health_wire import HealthRecord
from meshd.gossip.limits import array, raw, unpack_untrusted, whole
from meshd.gossip.statement import HASH_BYTES, STATEMENT_BYTES
from meshd.vocabulary import NodeId

WIRE: Final = 1
MAX_WANTS: Final = 32


class Kind(IntEnum):
    """What a datagram is for. A reader ignores kinds it does not know."""

    NONE = 0
    PING = 1
    ACK = 2
    PING_REQ = 3  # please ping somebody for me
    RELAYED = 4  # it answered me
    NACK = 5  # it did not answer me either
    NEWS = 6  # rumours only
    PULL = 7
    BEAT = 8  # a heartbeat that wants no answer (window detector)


class Tag(IntEnum):
    """The first entry of a rumour."""

    STATEMENT = 0
    SUSPECT = 2
    DEAD = 3
    JAM = 4


@dataclass(frozen=True, slots=True)
class Word:
    """A statement (unchecked), with its advert where the sender thought it new."""

    statement: bytes
    advert: bytes | None = None


@dataclass(frozen=True, slots=True)
class Accusation:
    """``accuser`` thinks ``subject`` in that run and incarnation suspect, or dead."""

    subject: NodeId
    epoch: int
    incarnation: int
    accuser: NodeId
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Jam:
    """A node's jammed flag flipped: its health, told at once."""

    record: HealthRecord


Rumour = Word | Accusation | Jam


@dataclass(frozen=True, slots=True)
class Datagram:
    """A decoded payload. ``kind`` NONE with another ``wire``: too far away to be read."""

    wire: int
    kind: Kind
    seq: int = 0
    digest: bytes = b""
    rumours: tuple[Rumour, ...] = ()
    health: tuple[HealthRecord, ...] = ()
    subject: NodeId | None = None
    wants: tuple[NodeId, ...] = ()
    round: int | None = None


def understands(wire: int) -> bool:
    """This version, the one before and the one after."""
    return abs(wire - WIRE) <= 1


def pack_word(word: Word) -> bytes:
    """A statement, with its advert if there is one, as a rumour."""
    body = [Tag.STATEMENT, word.statement] if word.advert is None else [Tag.STATEMENT, word.statement, word.advert]
    packed: bytes = msgpack.packb(body)
    return packed


def pack_accusation(a: Accusation) -> bytes:
    """An accusation as a rumour."""
    tag = Tag.DEAD if a.dead else Tag.SUSPECT
    packed: bytes = msgpack.packb([tag, bytes.fromhex(a.subject), a.epoch, a.incarnation, bytes.fromhex(a.accuser)])
    return packed


def pack_jam(record: bytes) -> bytes:
    """A jam rumour around an encoded health record."""
    return bytes((0x92, Tag.JAM)) + record


def assemble(
    kind: Kind,
    *,
    seq: int,
    digest: bytes,
    rumours: Sequence[bytes] = (),
    health: Sequence[bytes] = (),
    subject: NodeId | None = None,
    wants: Sequence[NodeId] = (),
    round_: int | None = None,
) -> bytes:
    """A payload from packed parts. Whoever chooses the parts keeps them below `PAYLOAD_BYTES`."""
    fields = [b"\x00", _pack(WIRE), b"\x01", _pack(int(kind)), b"\x02", _pack(seq), b"\x03", _pack(digest)]
    if rumours:
        fields += [b"\x04", _array_head(len(rumours)), *rumours]
    if health:
        fields += [b"\x05", _array_head(len(health)), *health]
    if subject is not None:
        fields += [b"\x06", _pack(bytes.fromhex(subject))]
    if wants:
        fields += [b"\x07", _pack([bytes.fromhex(node) for node in wants[:MAX_WANTS]])]
    if round_ is not None:
        fields += [b"\x08", _pack(round_)]
    count = 4 + bool(rumours) + bool(health) + (subject is not None) + bool(wants) + (round_ is not None)
    return bytes((0x80 | count,)) + b"".join(fields)


def decode_untrusted(data: bytes) -> Datagram:
    """Read a payload. Raises BadDatagram."""
    m = unpack_untrusted(data)
    if not isinstance(m, dict):
        raise BadDatagram("payload is not a map")
    wire = whole(m.get(0), "wire version", high=1 << 16)
    if not understands(wire):
        return Datagram(wire, Kind.NONE)
    kind = whole(m.get(1, 0), "kind", high=1 << 16)
    subject = m.get(6)
    return Datagram(
        wire,
        Kind(kind) if kind in _KINDS else Kind.NONE,
        whole(m.get(2, 0), "sequence", high=1 << 64),
        raw(m.get(3, b""), "digest") if m.get(3, b"") == b"" else raw(m[3], "digest", size=HASH_BYTES),
        read_rumours_untrusted(m.get(4, [])),
        tuple(health_wire.decode_untrusted(entry) for entry in array(m.get(5, []), "health")),
        None if subject is None else NodeId(raw(subject, "subject", size=16).hex()),
        tuple(NodeId(raw(w, "wanted id", size=16).hex()) for w in array(m.get(7, []), "wants")[:MAX_WANTS]),
        None if m.get(8) is None else whole(m[8], "round", high=(1 << 16) - 1),
    )


def read_rumours_untrusted(value: Any) -> tuple[Rumour, ...]:
    """Every rumour of a kind we know. Raises BadDatagram."""
    read = (_rumour(array(entry, "rumour", least=1)) for entry in array(value, "rumours"))
    return tuple(rumour for rumour in read if rumour is not None)


_KINDS: Final = frozenset(Kind)


def _rumour(entry: list[Any]) -> Rumour | None:
    match entry[0]:
        case Tag.STATEMENT:
            return _word(array(entry, "statement", least=2))
        case Tag.SUSPECT | Tag.DEAD:
            _, subject, epoch, incarnation, accuser = array(entry, "accusation", least=5)[:5]
            return Accusation(
                NodeId(raw(subject, "accused", size=16).hex()),
                whole(epoch, "epoch"),
                whole(incarnation, "incarnation"),
                NodeId(raw(accuser, "accuser", size=16).hex()),
                dead=entry[0] == Tag.DEAD,
            )
        case Tag.JAM:
            return Jam(health_wire.decode_untrusted(array(entry, "jam", least=2)[1]))
        case _:
            return None


def _word(entry: list[Any]) -> Word:
    statement = raw(entry[1], "statement")
    advert = raw(entry[2], "advert") if len(entry) > 2 and entry[2] is not None else None
    if len(statement) > STATEMENT_BYTES or (advert is not None and len(advert) > ADVERT_BYTES):
        raise BadDatagram("a statement or advert above its size")
    return Word(statement, advert)


def _array_head(length: int) -> bytes:
    return bytes((0x90 | length,)) if length < 16 else bytes((0xDC, length >> 8, length & 255))


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed
