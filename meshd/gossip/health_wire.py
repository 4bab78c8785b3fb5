"""Health as a short msgpack array, about 35 bytes: ``[who, age, ram_free, ram_total, load, …]``.

``who`` is the first 6 bytes of a node id (a reader ignores prefixes it cannot place); ``age`` is how old the sample was when
sent, in tenths of a second and rounded up, so that a copy relayed twice can only look older than it is and clocks never have
to agree. Health is not signed: a key holder could forge another's, which steers routing and never an election or a verdict.

A newer version may append entries; missing ones take Health's defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from meshd.errors import BadDatagram
from meshd.gossip.limits import array, number, raw
from meshd.vocabulary import Health, NodeId

WHO_BYTES: Final = 6
_AC_KNOWN, _ON_AC, _JAMMED = 1, 2, 4
_DEFAULTS: Final = [0.0] * 8 + [-1.0, 0.0, -1000.0]


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """A decoded record: whose (a prefix), how old, what."""

    who: bytes
    age_s: float
    health: Health


def who(node_id: NodeId) -> bytes:
    """The short form of a node id."""
    return bytes.fromhex(node_id[: 2 * WHO_BYTES])


def encode(node_id: NodeId, health: Health, age_s: float) -> bytes:
    """The record as msgpack bytes, ready to be placed in a datagram."""
    return head(node_id, age_s) + body(health)


def head(node_id: NodeId, age_s: float) -> bytes:
    """The part that changes with every sending: array header, owner and age."""
    age = min(255, math.ceil(max(0.0, age_s) * 10 - 1e-6))
    return b"\x9d\xc4\x06" + who(node_id) + (bytes([age]) if age < 128 else bytes([0xCC, age]))


def body(health: Health) -> bytes:
    """The eleven entries after owner and age, packed once a sample."""
    flags = (_AC_KNOWN if health.on_ac is not None else 0) | (_ON_AC if health.on_ac else 0)
    entries = (
        _count(health.ram_free_mb),
        _count(health.ram_total_mb),
        _count(health.load1 * 100),
        _count(health.in_flight),
        _count(health.queue_depth),
        _count(health.tokens_per_s * 10),
        _count(health.kv_used_mb),
        _count(health.kv_total_mb),
        -1 if health.battery_pct is None else max(0, min(100, health.battery_pct)),
        flags | (_JAMMED if health.jammed else 0),
        -1000 if health.temp_c is None else round(max(-99.0, min(200.0, health.temp_c))),
    )
    return b"".join(msgpack.packb(entry) for entry in entries)


def decode_untrusted(value: Any) -> HealthRecord:
    """The record of an unpacked array. Raises BadDatagram."""
    entries = array(value, "health", least=2)
    numbers = [number(entry, "health entry") for entry in entries[2:13]]
    numbers += _DEFAULTS[len(numbers) :]
    flags = int(numbers[9]) if numbers[9] >= 0 else 0
    age = number(entries[1], "health age") / 10
    if age < 0:
        raise BadDatagram("health from the future")
    return HealthRecord(
        raw(entries[0], "health owner", size=WHO_BYTES),
        age,
        Health(
            ram_free_mb=int(numbers[0]),
            ram_total_mb=int(numbers[1]),
            load1=numbers[2] / 100,
            in_flight=int(numbers[3]),
            queue_depth=int(numbers[4]),
            tokens_per_s=numbers[5] / 10,
            kv_used_mb=int(numbers[6]),
            kv_total_mb=int(numbers[7]),
            battery_pct=int(numbers[8]) if numbers[8] >= 0 else None,
            on_ac=bool(flags & _ON_AC) if flags & _AC_KNOWN else None,
            temp_c=numbers[10] if numbers[10] > -1000 else None,
            jammed=bool(flags & _JAMMED),
        ),
    )


def _count(value: float) -> int:
    """A count as the wire holds it: whole, not negative, four bytes at most."""
    return max(0, min(0xFFFFFFFF, round(value))) if math.isfinite(value) else 0
