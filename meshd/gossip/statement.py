"""What a node says of itself, signed: "I am run ``epoch``, incarnation ``i``, my advert hashes to ``h``" or "I leave".

A statement is 35 bytes and a signature. It is the only thing that can make anybody believe a member alive again, so nobody
but its owner can; the 8-byte ``digest`` of its bytes, carried by every ping and ack, tells a reader whether it has the newest.
Signing and checking are handed in: this module knows no keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgpack

from meshd.gossip.limits import array, raw, unpack_untrusted, whole
from meshd.vocabulary import NodeId

HASH_BYTES: Final = 8
STATEMENT_BYTES: Final = 220

Sign = Callable[[bytes], bytes]
Verify = Callable[[NodeId, bytes, bytes], bool]


def short_hash(data: bytes) -> bytes:
    """The 8-byte name of a blob."""
    return hashlib.sha256(data).digest()[:HASH_BYTES]


@dataclass(frozen=True, slots=True)
class Statement:
    """One signed word of ``node_id``. ``encoded`` is what travels and what ``digest`` is the hash of."""

    node_id: NodeId
    epoch: int
    incarnation: int
    advert_hash: bytes
    left: bool
    encoded: bytes
    digest: bytes

    @property
    def version(self) -> tuple[int, int]:
        """What orders the statements of one node."""
        return (self.epoch, self.incarnation)


def make(node_id: NodeId, epoch: int, incarnation: int, advert_hash: bytes, *, left: bool, sign: Sign) -> Statement:
    """Sign a new statement of our own."""
    body: bytes = msgpack.packb([bytes.fromhex(node_id), epoch, incarnation, advert_hash, left])
    encoded: bytes = msgpack.packb([body, sign(body)])
    return Statement(node_id, epoch, incarnation, advert_hash, left, encoded, short_hash(encoded))


def read_untrusted(encoded: bytes) -> tuple[Statement, bytes, bytes]:
    """The statement, and the body and signature that still have to be checked. Raises BadDatagram."""
    outer = array(unpack_untrusted(encoded, limit=STATEMENT_BYTES), "statement", least=2)
    body, signature = raw(outer[0], "statement body"), raw(outer[1], "signature")
    entries = array(unpack_untrusted(body, limit=STATEMENT_BYTES), "statement", least=5)
    statement = Statement(
        NodeId(raw(entries[0], "node id", size=16).hex()),
        whole(entries[1], "epoch"),
        whole(entries[2], "incarnation"),
        raw(entries[3], "advert hash", size=HASH_BYTES),
        entries[4] is True,
        encoded,
        short_hash(encoded),
    )
    return statement, body, signature
