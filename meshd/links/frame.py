"""The frame codec: the bytes of a link, between peers and between a daemon and its engine worker.

Owns the layout and its caps. Knows nothing of streams' states, credit, sockets or tasks.

A frame is a 9-byte head (u32 payload length, u8 type, u32 stream id, big-endian) and a payload. Stream 0 is the link itself
(PING, PONG, GOAWAY); every other frame names a stream. Maps travel as msgpack, bodies raw.

Invariants: `FrameDecoder.feed_untrusted` raises only `BadFrame`, and looks at a frame's length before it keeps a byte of its
payload, so a link never buffers more than one frame beyond what it was fed. What an encoder lets through, the decoder takes:
the caps are checked at both ends, because a head that only the peer finds too large would cost the link.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from meshd.errors import BadFrame
from meshd.links.wire import Message

MAX_HEAD_BYTES: Final = 16 << 10
MAX_DATA_BYTES: Final = 64 << 10
MAX_BODY_BYTES: Final = 64 << 20
MAX_CREDIT_BYTES: Final = 1 << 30
MAX_MAP: Final = 32
MAX_ARRAY: Final = 64
MAX_STR_BYTES: Final = 256
MAX_DEPTH: Final = 8
HEAD_COST_BYTES: Final = 256
"""What a HEAD counts under credit beside its payload: about what an empty message costs in the receiver's memory."""

_PREFIX: Final = struct.Struct(">IBI")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
PREFIX_BYTES: Final = _PREFIX.size

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Head:
    """Begins a message (the first one opens the stream); ``body_bytes`` of DATA follow. ``packed`` is what goes on the wire."""

    stream: int
    kind: str
    head: Mapping[str, Any]
    body_bytes: int
    packed: bytes = field(repr=False, compare=False, default=b"")


@dataclass(frozen=True, slots=True)
class Data:
    """The next piece of the message's body; never empty."""

    stream: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class End:
    """No more messages from this side."""

    stream: int


@dataclass(frozen=True, slots=True)
class Window:
    """``credit_bytes`` more may be sent on the stream."""

    stream: int
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop: nobody reads this stream any more."""

    stream: int


@dataclass(frozen=True, slots=True)
class Err:
    """The stream ended with an error; ``detail`` is what its class needs beside the message."""

    stream: int
    code: str
    message: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with a PONG of the same nonce."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a PING, with the sender's state."""

    nonce: int
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Goaway:
    """The sender opens and takes no more streams and will close."""

    reason: str


Frame = Head | Data | End | Window | Cancel | Err | Ping | Pong | Goaway

_HEAD, _DATA, _END, _WINDOW, _CANCEL, _ERR, _PING, _PONG, _GOAWAY = range(1, 10)

_LONGEST: Final = {
    _HEAD: MAX_HEAD_BYTES,
    _DATA: MAX_DATA_BYTES,
    _END: 0,
    _WINDOW: _U32.size,
    _CANCEL: 0,
    _ERR: MAX_HEAD_BYTES,
    _PING: _U64.size,
    _PONG: _U64.size + MAX_HEAD_BYTES,
    _GOAWAY: MAX_STR_BYTES,
}
_LINK_WIDE: Final = frozenset({_PING, _PONG, _GOAWAY})
_NESTS: Final = frozenset({dict, list})


def cost_bytes(frame: Head | Data) -> int:
    """What a frame takes from its stream's credit, the same at both ends."""
    return len(frame.payload) if isinstance(frame, Data) else len(frame.packed) + HEAD_COST_BYTES


def message_frames(stream: int, message: Message) -> list[Head | Data]:
    """The frames of one message; the body is sliced, not copied. Raises ValueError for a message above a cap."""
    body, size = message.body, len(message.body)
    if size > MAX_BODY_BYTES:
        raise ValueError(f"a {message.kind} message of {size} bytes is above {MAX_BODY_BYTES}")
    head = Head(stream, message.kind, message.head, size, _pack([message.kind, message.head, size]))
    if size <= MAX_DATA_BYTES:
        return [head, Data(stream, body)] if body else [head]
    view = memoryview(body)
    pieces = (view[start : start + MAX_DATA_BYTES] for start in range(0, size, MAX_DATA_BYTES))
    return [head, *(Data(stream, piece) for piece in pieces)]


def encode(frame: Frame) -> tuple[Buffer, ...]:  # noqa: PLR0911  # one return per frame type reads as a table
    """The buffers of a frame, payload of DATA uncopied. Raises ValueError for a map, string or payload above a cap."""
    match frame:
        case Data():
            size = len(frame.payload)
            if not 0 < size <= MAX_DATA_BYTES:
                raise ValueError(f"a DATA frame of {size} bytes")
            return _PREFIX.pack(size, _DATA, frame.stream), frame.payload
        case Head():
            packed = frame.packed or _pack([frame.kind, frame.head, frame.body_bytes])
            return _PREFIX.pack(len(packed), _HEAD, frame.stream), packed
        case End(stream):
            return _framed(_END, stream, b"")
        case Window(stream, credit_bytes):
            return _framed(_WINDOW, stream, _U32.pack(credit_bytes))
        case Cancel(stream):
            return _framed(_CANCEL, stream, b"")
        case Err(stream, code, message, detail):
            return _framed(_ERR, stream, _pack([clip(code), clip(message), detail]))
        case Ping(nonce):
            return _framed(_PING, 0, _U64.pack(nonce))
        case Pong(nonce, state):
            return _framed(_PONG, 0, _U64.pack(nonce) + _pack(state))
        case Goaway(reason):
            return _framed(_GOAWAY, 0, clip(reason).encode())


def clip(text: str) -> str:
    """``text`` cut to what a string on the wire may hold; lone surrogates are replaced."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= MAX_STR_BYTES:
        return raw.decode()
    return raw[: MAX_STR_BYTES - 3].decode("utf-8", "ignore") + "…"


def _framed(kind: int, stream: int, payload: bytes) -> tuple[bytes]:
    return (_PREFIX.pack(len(payload), kind, stream) + payload,)


def _pack(value: object) -> bytes:
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
        _unpack(packed)
    except (ValueError, TypeError, OverflowError, BadFrame) as error:
        raise ValueError(f"a head that may not travel: {error}") from error
    return packed


def _refuse_ext(code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {code}")


def _unpack(payload: Buffer) -> Any:
    """Decode one msgpack value under the caps. Raises only BadFrame."""
    if len(payload) > MAX_HEAD_BYTES:
        raise BadFrame(f"a head of {len(payload)} bytes is above {MAX_HEAD_BYTES}")
    try:
        value = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_ext,
            max_str_len=MAX_STR_BYTES,
            max_bin_len=MAX_HEAD_BYTES,
            max_array_len=MAX_ARRAY,
            max_map_len=MAX_MAP,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(f"not a head: {error}") from error
    _check_plain(value)
    return value


def _check_plain(value: object, depth: int = MAX_DEPTH) -> None:
    """Every key a string, at most ``depth`` containers within each other, which bounds the recursion too."""
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise BadFrame("a map key that is not a string")
        items: Any = value.values()
    elif type(value) is list:
        items = value
    else:
        return
    if not depth:
        raise BadFrame(f"a head nested deeper than {MAX_DEPTH}")
    for item in items:
        if type(item) in _NESTS:
            _check_plain(item, depth - 1)


class FrameDecoder:
    """Bytes in, frames out, at any split. After a BadFrame it takes nothing more."""

    __slots__ = ("_broken", "_rest")

    def __init__(self) -> None:
        self._rest = b""  # of a frame that is not complete yet; never a whole one
        self._broken = False

    def feed_untrusted(self, data: Buffer) -> list[Frame]:
        """The frames that ``data`` completes. Raises only BadFrame, and from then on always."""
        if self._broken:
            raise BadFrame("bytes after a bad frame")
        buffer = memoryview(self._rest + data if self._rest else data)
        frames: list[Frame] = []
        at = 0
        try:
            while len(buffer) - at >= PREFIX_BYTES:
                length, kind, stream = _PREFIX.unpack_from(buffer, at)
                _check_prefix(length, kind, stream)
                end = at + PREFIX_BYTES + length
                if end > len(buffer):
                    break
                frames.append(_READ_UNTRUSTED[kind](stream, buffer[at + PREFIX_BYTES : end]))
                at = end
        except BadFrame:
            self._broken, self._rest = True, b""
            raise
        self._rest = bytes(buffer[at:])
        return frames


def _check_prefix(length: int, kind: int, stream: int) -> None:
    longest = _LONGEST.get(kind)
    if longest is None:
        raise BadFrame(f"frame type {kind}")
    if length > longest:
        raise BadFrame(f"a frame of type {kind} with {length} bytes is above {longest}")
    if (stream == 0) != (kind in _LINK_WIDE):
        raise BadFrame(f"a frame of type {kind} on stream {stream}")


def _head_untrusted(stream: int, payload: memoryview) -> Head:
    packed = bytes(payload)
    kind, head, body_bytes = _fields(_unpack(packed), str, dict, int)
    if not 0 <= body_bytes <= MAX_BODY_BYTES:
        raise BadFrame(f"a body of {body_bytes} bytes is above {MAX_BODY_BYTES}")
    return Head(stream, kind, head, body_bytes, packed)


def _data_untrusted(stream: int, payload: memoryview) -> Data:
    if not payload:
        raise BadFrame("an empty DATA frame")
    return Data(stream, bytes(payload))


def _window_untrusted(stream: int, payload: memoryview) -> Window:
    if len(payload) != _U32.size:
        raise BadFrame(f"a WINDOW of {len(payload)} bytes")
    credit: int = _U32.unpack(payload)[0]
    if not 0 < credit <= MAX_CREDIT_BYTES:
        raise BadFrame(f"a WINDOW that grants {credit}")
    return Window(stream, credit)


def _err_untrusted(stream: int, payload: memoryview) -> Err:
    code, message, detail = _fields(_unpack(payload), str, str, dict)
    return Err(stream, code, message, detail)


def _pong_untrusted(_stream: int, payload: memoryview) -> Pong:
    nonce = _nonce_untrusted(payload)
    (state,) = _fields([_unpack(payload[_U64.size :])], dict)
    return Pong(nonce, state)


def _goaway_untrusted(_stream: int, payload: memoryview) -> Goaway:
    try:
        return Goaway(str(payload, "utf-8"))
    except UnicodeDecodeError as error:
        raise BadFrame("a GOAWAY whose reason is not text") from error


def _nonce_untrusted(payload: memoryview) -> int:
    if len(payload) < _U64.size:
        raise BadFrame(f"a PING or PONG of {len(payload)} bytes")
    nonce: int = _U64.unpack_from(payload)[0]
    return nonce


def _fields(value: Any, *types: type) -> Any:
    """``value`` if it is an array of exactly these types (a bool is no int)."""
    if not isinstance(value, list) or tuple(map(type, value)) != types:
        raise BadFrame(f"not an array of {', '.join(t.__name__ for t in types)}")
    return value


_READ_UNTRUSTED: Final[Mapping[int, Callable[[int, memoryview], Frame]]] = {
    _HEAD: _head_untrusted,
    _DATA: _data_untrusted,
    _END: lambda stream, _payload: End(stream),
    _WINDOW: _window_untrusted,
    _CANCEL: lambda stream, _payload: Cancel(stream),
    _ERR: _err_untrusted,
    _PING: lambda _stream, payload: Ping(_nonce_untrusted(payload)),
    _PONG: _pong_untrusted,
    _GOAWAY: _goaway_untrusted,
}
