"""Push-pull: two nodes make their tables agree, over a link, in one or two round trips.

The caller sends SUM (a fingerprint of the live table and its own word); equal fingerprints end it there, so that anti-entropy
costs the same whatever the size of the room. Otherwise the other answers ENTRIES (who, which statement, how it stands), the
caller sends NEWS (what the other lacks, what it wants itself) and gets NEWS back. The answering side keeps no state.

Deaths do not travel this way, only statements and running suspicions: a table from the far side of a healed partition calls
half the room dead, and each of those hears it at its first packet and answers. So no exchange can bury a healthy room.

Messages are msgpack maps ``{0: step, 1: words, 2: fingerprint, 3: accusations, 4: wants, 5: entries}``; unknown keys are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import msgpack

from meshd.errors import BadDatagram
from meshd.gossip.advert_wire import ADVERT_BYTES
from meshd.gossip.limits import EXCHANGE_BYTES, array, raw, unpack_untrusted, whole
from meshd.gossip.statement import STATEMENT_BYTES
from meshd.gossip.wire import Accusation, Word
from meshd.vocabulary import NodeId

MAX_ENTRIES: Final = 4096


class Step(IntEnum):
    """Where an exchange is."""

    SUM = 1
    SAME = 2
    ENTRIES = 3
    NEWS = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """Which statement of a member the sender has."""

    node_id: NodeId
    version: tuple[int, int]  # epoch, incarnation


@dataclass(frozen=True, slots=True)
class Message:
    """One decoded message of an exchange."""

    step: Step
    words: tuple[Word, ...] = ()
    fingerprint: bytes = b""
    entries: tuple[Entry, ...] = ()
    accusations: tuple[Accusation, ...] = ()
    wants: tuple[NodeId, ...] = ()


def encode(message: Message) -> bytes:
    """The message as it travels; empty parts are left out."""
    fields: dict[int, Any] = {
        0: int(message.step),
        1: [[w.statement, w.advert] for w in message.words],
        2: message.fingerprint,
        3: [[bytes.fromhex(a.subject), a.epoch, a.incarnation] for a in message.accusations],
        4: [bytes.fromhex(node) for node in message.wants],
        5: [[bytes.fromhex(e.node_id), *e.version] for e in message.entries],
    }
    packed: bytes = msgpack.packb({key: value for key, value in fields.items() if value})
    return packed


def decode_untrusted(data: bytes, sender: NodeId) -> Message:
    """Read a message; accusations in it are ``sender``'s. Raises BadDatagram."""
    m = unpack_untrusted(data, limit=EXCHANGE_BYTES, array=MAX_ENTRIES)
    if not isinstance(m, dict) or m.get(0) not in tuple(Step):
        raise BadDatagram("not a push-pull message")
    return Message(
        Step(m[0]),
        tuple(_word(w) for w in array(m.get(1, []), "words")),
        raw(m.get(2, b""), "fingerprint"),
        tuple(_entry(e) for e in array(m.get(5, []), "entries")),
        tuple(_accusation(a, sender) for a in array(m.get(3, []), "accusations")),
        tuple(NodeId(raw(w, "wanted id", size=16).hex()) for w in array(m.get(4, []), "wants")),
    )


def _word(value: Any) -> Word:
    statement, advert = array(value, "word", least=2)[:2]
    if len(raw(statement, "statement")) > STATEMENT_BYTES:
        raise BadDatagram("a statement above its size")
    if advert is not None and len(raw(advert, "advert")) > ADVERT_BYTES:
        raise BadDatagram("an advert above its size")
    return Word(statement, advert)


def _entry(value: Any) -> Entry:
    node, epoch, incarnation = array(value, "entry", least=3)[:3]
    version = (whole(epoch, "epoch"), whole(incarnation, "incarnation"))
    return Entry(NodeId(raw(node, "node id", size=16).hex()), version)


def _accusation(value: Any, sender: NodeId) -> Accusation:
    node, epoch, incarnation = array(value, "accusation", least=3)[:3]
    subject = NodeId(raw(node, "accused", size=16).hex())
    return Accusation(subject, whole(epoch, "epoch"), whole(incarnation, "incarnation"), sender)
