"""Caps shared by everything that reads gossip bytes, and the one way to unpack them.

Invariant: nothing is allocated beyond these caps whatever the bytes say; the only error is BadDatagram.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from meshd.errors import BadDatagram

DATAGRAM_BYTES: Final = 1200  # below every path MTU in use, IPv6 tunnels included: no fragment ever
SEAL_BYTES: Final = 80  # room for magic, key id, sender, boot, counter and tag of the sealed datagram
PAYLOAD_BYTES: Final = DATAGRAM_BYTES - SEAL_BYTES
EXCHANGE_BYTES: Final = 4 << 20  # one message of a push-pull, over a link
MAX_COUNT: Final = 1 << 48  # epochs and incarnations
MAX_JUMP: Final = MAX_COUNT // 2  # no incarnation rises so far but one by one


def unpack_untrusted(data: bytes, *, limit: int = PAYLOAD_BYTES, array: int = 64) -> Any:
    """One msgpack value, nothing after it. ``limit`` caps bytes, ``array`` the length of any array."""
    if len(data) > limit:
        raise BadDatagram(f"{len(data)} bytes where at most {limit} are allowed")
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            max_map_len=32,
            max_array_len=array,
            max_str_len=256,
            max_bin_len=PAYLOAD_BYTES,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a list as a key
        raise BadDatagram(f"not msgpack: {error}") from None


def whole(value: Any, what: str, *, low: int = 0, high: int = MAX_COUNT) -> int:
    """An integer between ``low`` and ``high`` (bool is not one)."""
    if type(value) is not int or not low <= value <= high:
        raise BadDatagram(f"{what} is not a number between {low} and {high}")
    return value


def number(value: Any, what: str) -> float:
    """A finite number of sane size."""
    if type(value) not in (int, float) or not -1e12 < value < 1e12:
        raise BadDatagram(f"{what} is not a finite number")
    return float(value)


def text(value: Any, what: str, *, longest: int = 256) -> str:
    """A text."""
    if not isinstance(value, str) or len(value) > longest:
        raise BadDatagram(f"{what} is not a text of at most {longest} characters")
    return value


def raw(value: Any, what: str, *, size: int | None = None) -> bytes:
    """Bytes, of exactly ``size`` where given."""
    if not isinstance(value, bytes) or (size is not None and len(value) != size):
        raise BadDatagram(f"{what} is not {'bytes' if size is None else f'{size} bytes'}")
    return value


def array(value: Any, what: str, *, least: int = 0) -> list[Any]:
    """A list of at least ``least`` entries; more than a reader knows are a newer version's and ignored."""
    if not isinstance(value, list) or len(value) < least:
        raise BadDatagram(f"{what} is not an array of at least {least}")
    return value
