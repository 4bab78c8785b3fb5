"""Probes and spot checks as bytes: round trips, caps, and whatever else comes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.admission import probe_wire, spot_wire
from meshd.admission.probe_wire import ProbeAnswer, ProbeRequest
from meshd.admission.spot_wire import Rows
from meshd.errors import BadFrame
from meshd.links.wire import Message
from meshd.vocabulary import LayerRange

REQUEST = ProbeRequest("d" * 32, 3, LayerRange(2, 5), (9, 10, 16), bytes(range(35)) * 4)
ANSWER = ProbeAnswer("d" * 32, 3, LayerRange(2, 5), (b"a" * 16, b"b" * 16), ((1, 2, 3, 4), (5, 6, 7, 8)))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=20) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=10,
)


def test_round_trips() -> None:
    assert probe_wire.request_untrusted(probe_wire.request_message(REQUEST)) == REQUEST
    assert [len(part) for part in REQUEST.prompts()] == [36, 40, 64]
    assert b"".join(REQUEST.prompts()) == REQUEST.rows
    assert probe_wire.answer_untrusted(probe_wire.answer_message(ANSWER)) == ANSWER
    rows = Rows("d" * 32, 1, LayerRange(0, 2), 3, b"abcdef")
    assert spot_wire.rows_untrusted(rows.message(spot_wire.ROWS), spot_wire.ROWS) == rows


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [9]},
        {"lengths": [9] * 10},
        {"lengths": [4, 9]},
        {"lengths": [17, 9]},
        {"lengths": [9, True]},
        {"lengths": None},
        {"digest": ""},
        {"digest": 5},
        {"generation": -1},
        {"layers": [5, 2]},
    ],
)
def test_damaged_probes_are_refused(change: dict[str, Any]) -> None:
    message = probe_wire.request_message(REQUEST)
    with pytest.raises(BadFrame):
        probe_wire.request_untrusted(Message(message.kind, {**message.head, **change}, message.body))


@pytest.mark.parametrize(
    "change", [{"prompts": 0}, {"prompts": 99}, {"greedy": [[1]]}, {"greedy": [[1, 2, 3, -1]] * 2}]
)
def test_damaged_answers_are_refused(change: dict[str, Any]) -> None:
    message = probe_wire.answer_message(ANSWER)
    with pytest.raises(BadFrame):
        probe_wire.answer_untrusted(Message(message.kind, {**message.head, **change}, message.body))


@given(
    st.sampled_from(["probe", "probed", "probe.rows"]),
    st.dictionaries(st.sampled_from(["digest", "generation", "layers", "lengths", "prompts", "greedy", "n"]), PLAIN),
    st.binary(max_size=80),
)
def test_nothing_but_badframe_is_raised(kind: str, head: dict[str, Any], body: bytes) -> None:
    message = Message(kind, head, body)
    for read in (
        probe_wire.request_untrusted,
        probe_wire.answer_untrusted,
        lambda m: spot_wire.rows_untrusted(m, spot_wire.ROWS),
    ):
        try:
            read(message)
        except BadFrame:
            continue
