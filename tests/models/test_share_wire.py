"""What neighbours say to each other about models: whatever comes is read or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import BadFrame
from meshd.links.fields import digest_untrusted
from meshd.links.wire import Message
from meshd.node import share_wire as wire
from meshd.node.share_wire import Offer
from meshd.vocabulary import LayerRange

OFFER = Offer(
    "org/m", "int8", (LayerRange(0, 3), LayerRange(5, 9)), {"config.json": 12, "qspec.safetensors": 99}, b"{}"
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=20) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def test_round_trips() -> None:
    assert wire.offer_untrusted(wire.offer_message(OFFER)) == OFFER
    asked = wire.ask_parts("d" * 32, [("a" * 500, 0), ("b", 1 << 40)])
    assert wire.parts_untrusted(asked) == [("a" * 500, 0), ("b", 1 << 40)]
    assert digest_untrusted(asked.head) == "d" * 32
    assert wire.file_untrusted(wire.ask_file("d", "config.json")) == "config.json"
    assert wire.piece_untrusted(wire.piece_message(3, 70, b"xy")) == (3, 70, b"xy")


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "pytorch_model.bin", "", None, 7, ["config.json"]])
def test_no_other_file_is_given_out(name: Any) -> None:
    with pytest.raises(BadFrame):
        wire.file_untrusted(Message(wire.FILE, {"digest": "d", "name": name}))


@pytest.mark.parametrize(
    "parts",
    [[], [["a"]], [["a", -1]], [["a", True]], [[1, 0]], [["a" * 600, 0]], {"a": 1}, [["a", 0]] * 129, [["a", 1 << 60]]],
)
def test_damaged_lists_of_tensors_are_refused(parts: Any) -> None:
    with pytest.raises(BadFrame):
        wire.parts_untrusted(Message(wire.PART, {"digest": "d"}, json.dumps(parts).encode()))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"name": 3},
        {"held": [[3, 1]]},
        {"held": [[0, 1]] * 33},
        {"held": [[0, True]]},
        {"files": [["model.bin", 1]]},
        {"files": [["config.json", 1 << 40]]},
        {"files": [["config.json", -1]]},
        {"dtype": None},
    ],
)
def test_damaged_offers_are_refused(change: dict[str, Any]) -> None:
    message = wire.offer_message(OFFER)
    with pytest.raises(BadFrame):
        wire.offer_untrusted(Message(message.kind, {**message.head, **change}, message.body))


@given(
    st.sampled_from(["manifest", "piece", "x"]),
    st.dictionaries(st.sampled_from(["name", "dtype", "held", "files", "rehearsal", "i", "at", "digest"]), PLAIN),
    st.binary(max_size=64),
)
def test_nothing_but_badframe_is_raised(kind: str, head: dict[str, Any], body: bytes) -> None:
    message = Message(kind, head, body)
    for read in (
        wire.offer_untrusted,
        wire.piece_untrusted,
        wire.parts_untrusted,
        wire.file_untrusted,
        lambda asked: digest_untrusted(asked.head),
    ):
        try:
            read(message)
        except BadFrame:
            continue
