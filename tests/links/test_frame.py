"""The frame codec: what is encoded comes back at any split; what is not a frame costs a BadFrame and nothing else."""

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import BadFrame
from meshd.links.frame import (
    MAX_BODY_BYTES,
    MAX_CREDIT_BYTES,
    MAX_DATA_BYTES,
    MAX_DEPTH,
    MAX_HEAD_BYTES,
    MAX_STR_BYTES,
    PREFIX_BYTES,
    Cancel,
    Data,
    End,
    Err,
    Frame,
    FrameDecoder,
    Goaway,
    Head,
    Ping,
    Pong,
    Window,
    clip,
    cost_bytes,
    encode,
    message_frames,
)
from meshd.links.wire import Message

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
maps = st.dictionaries(st.text(max_size=8), plain, max_size=5)
streams = st.integers(1, 2**32 - 1)
nonces = st.integers(0, 2**64 - 1)
frames = st.one_of(
    st.builds(Head, streams, st.text(max_size=20), maps, st.integers(0, MAX_BODY_BYTES)),
    st.builds(Data, streams, st.binary(min_size=1, max_size=300)),
    st.builds(End, streams),
    st.builds(Window, streams, st.integers(1, MAX_CREDIT_BYTES)),
    st.builds(Cancel, streams),
    st.builds(Err, streams, st.text(max_size=20), st.text(max_size=60), maps),
    st.builds(Ping, nonces),
    st.builds(Pong, nonces, maps),
    st.builds(Goaway, st.text(max_size=60)),
)


def wire(*sent: Frame) -> bytes:
    return b"".join(bytes(buffer) for frame in sent for buffer in encode(frame))


@given(st.lists(frames, max_size=6), st.data())
def test_frames_survive_any_split(sent: list[Frame], data: st.DataObject) -> None:
    raw = wire(*sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    decoder = FrameDecoder()
    got: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        got += decoder.feed_untrusted(raw[start:end])
    assert got == sent
    assert decoder._rest == b""


@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_mutated_bytes_raise_only_bad_frame(sent: list[Frame], data: st.DataObject) -> None:
    raw = bytearray(wire(*sent))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decoder = FrameDecoder()
    try:
        decoder.feed_untrusted(bytes(raw))
    except BadFrame:
        with pytest.raises(BadFrame):
            decoder.feed_untrusted(wire(Ping(1)))


@given(st.binary(max_size=200))
def test_noise_raises_only_bad_frame(noise: bytes) -> None:
    decoder = FrameDecoder()
    try:
        decoder.feed_untrusted(noise)
    except BadFrame:
        return
    assert len(decoder._rest) <= len(noise)


@given(st.binary(max_size=200), st.sampled_from([1, 6, 8]))
def test_noise_as_msgpack_raises_only_bad_frame(noise: bytes, kind: int) -> None:
    prefix = len(noise).to_bytes(4, "big") + bytes([kind]) + (0 if kind == 8 else 1).to_bytes(4, "big")
    try:
        FrameDecoder().feed_untrusted(prefix + noise)
    except BadFrame:
        return


@pytest.mark.parametrize(
    ("kind", "length"),
    [(1, MAX_HEAD_BYTES + 1), (2, MAX_DATA_BYTES + 1), (3, 1), (4, 5), (7, 9), (9, MAX_STR_BYTES + 1), (2, 2**32 - 1)],
)
def test_a_length_above_the_cap_is_refused_before_the_payload(kind: int, length: int) -> None:
    stream = 0 if kind in (7, 8, 9) else 1
    with pytest.raises(BadFrame, match="above"):
        FrameDecoder().feed_untrusted(length.to_bytes(4, "big") + bytes([kind]) + stream.to_bytes(4, "big"))


@pytest.mark.parametrize(("kind", "stream"), [(0, 1), (10, 1), (255, 0), (1, 0), (2, 0), (7, 1), (9, 3)])
def test_unknown_types_and_misplaced_streams_are_refused(kind: int, stream: int) -> None:
    with pytest.raises(BadFrame):
        FrameDecoder().feed_untrusted(b"\0\0\0\0" + bytes([kind]) + stream.to_bytes(4, "big"))


def _head_of(packed: bytes) -> bytes:
    return len(packed).to_bytes(4, "big") + b"\x01\0\0\0\x01" + packed


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        ["kind", {str(i): i for i in range(33)}, 0],
        ["kind", {"a": [0] * 65}, 0],
        ["kind", {"a": "x" * 257}, 0],
        ["kind", {"a": msgpack.ExtType(5, b"")}, 0],
        ["kind", {"a": msgpack.ExtType(5, b"data")}, 0],
        ["kind", {"a": msgpack.Timestamp(1)}, 0],
        ["kind", {b"a": 1}, 0],
        ["kind", {1: 1}, 0],
        ["kind", {"a": _nested(MAX_DEPTH)}, 0],
        ["kind", {"a": _nested(600)}, 0],
        ["kind", {}, -1],
        ["kind", {}, MAX_BODY_BYTES + 1],
        ["kind", {}, True],
        ["kind", {}, 1.0],
        ["kind", {}],
        {"kind": "x"},
        [b"kind", {}, 0],
        3,
    ],
)
def test_heads_above_a_cap_are_refused(value: object) -> None:
    with pytest.raises(BadFrame):
        FrameDecoder().feed_untrusted(_head_of(msgpack.packb(value)))


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xa2\xff\xfe", b"\x93"]
)
def test_damaged_msgpack_is_refused_and_costs_nothing(packed: bytes) -> None:
    raw = _head_of(packed)
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            FrameDecoder().feed_untrusted(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_declared_body_is_not_allocated() -> None:
    raw = wire(Head(1, "big", {}, MAX_BODY_BYTES))
    tracemalloc.start()
    try:
        FrameDecoder().feed_untrusted(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "head",
    [
        {"a": "x" * 257},
        {"a": [0] * 65},
        {"a": b"x" * MAX_HEAD_BYTES},
        {"a": 2**70},
        {"a": object()},
        {"a": "\ud800"},
        {1: 2},
    ],
)
def test_the_sender_refuses_what_the_receiver_would(head: dict[Any, object]) -> None:
    with pytest.raises(ValueError, match="may not travel"):
        message_frames(1, Message("kind", head))
    with pytest.raises(ValueError, match="may not travel"):
        encode(Pong(1, head))


def test_a_message_is_one_head_and_uncopied_slices() -> None:
    body = bytes(range(256)) * 1024
    head, *parts = message_frames(7, Message("rows", {"n": 1}, body))
    assert isinstance(head, Head)
    assert head.body_bytes == len(body)
    assert cost_bytes(head) > 0
    assert all(isinstance(part, Data) and 0 < len(part.payload) <= MAX_DATA_BYTES for part in parts)
    assert b"".join(part.payload for part in parts if isinstance(part, Data)) == body
    assert all(
        part.payload.obj is body for part in parts if isinstance(part, Data) and isinstance(part.payload, memoryview)
    )
    assert [type(frame) for frame in message_frames(7, Message("bare"))] == [Head]


def test_a_body_above_the_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="above"):
        message_frames(1, Message("rows", {}, bytes(MAX_BODY_BYTES + 1)))


@given(st.text(max_size=600))
def test_clipped_text_fits_the_wire(text: str) -> None:
    assert len(clip(text).encode()) <= MAX_STR_BYTES
    if len(text.encode("utf-8", "replace")) <= MAX_STR_BYTES:
        assert clip(text) == text


def test_a_long_error_travels_shortened() -> None:
    (got,) = FrameDecoder().feed_untrusted(wire(Err(3, "engine_failed", "x" * 5000)))
    assert isinstance(got, Err)
    assert got.message.startswith("xxx")


def test_pending_never_holds_a_whole_frame() -> None:
    raw = wire(Data(1, b"x" * MAX_DATA_BYTES))
    decoder = FrameDecoder()
    decoder.feed_untrusted(raw[:-1])
    assert len(decoder._rest) == len(raw) - 1 < PREFIX_BYTES + MAX_DATA_BYTES
