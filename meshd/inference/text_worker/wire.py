"""How the daemon and its text worker talk: one request, one answer, each a length and a msgpack map.

Calls are short and strictly one after the other, so there are no streams and no credit here. Errors: ValueError for bytes that
are no message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import msgpack

LENGTH: Final = struct.Struct(">I")
MAX_BYTES: Final = 64 << 20


def pack(message: Mapping[str, Any]) -> bytes:
    """A message with its length in front."""
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a text of {len(body)} bytes is above {MAX_BYTES}")
    return LENGTH.pack(len(body)) + body


def length(prefix: bytes) -> int:
    """How long the message behind ``prefix`` is."""
    (size,) = LENGTH.unpack(prefix)
    if size > MAX_BYTES:
        raise ValueError(f"a message of {size} bytes is above {MAX_BYTES}")
    return int(size)


def unpack(body: bytes) -> dict[str, Any]:
    """Read a message's body."""
    try:
        message = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not a message: {error}") from error
    if not isinstance(message, dict):
        raise ValueError("not a message: no map")
    return message
