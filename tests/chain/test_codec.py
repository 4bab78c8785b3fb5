from __future__ import annotations

from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.chain.codec import from_wire_untrusted, to_wire
from meshd.chain.messages import (
    Ask,
    ChainMessage,
    End,
    Fill,
    Lost,
    Need,
    Open,
    Opened,
    Phase,
    Progress,
    Reply,
    Step,
    Trace,
    Why,
)
from meshd.chain.plan import Plan
from meshd.errors import BadFrame
from meshd.inference.engine import Choice, Sampling
from meshd.links.wire import Message
from meshd.vocabulary import Hop, LayerRange, NodeId, SessionId

SESSION = SessionId("0123456789abcdef" * 2)
NODE = NodeId("f" * 32)
counts = st.integers(0, 1 << 20)
floats = st.floats(0, 1e6).map(lambda x: round(x, 3))
traces = st.lists(st.builds(Trace, floats, floats, counts, st.booleans()), max_size=4).map(tuple)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    cuts = sorted(draw(st.sets(st.integers(1, 40), min_size=2, max_size=8)))
    first = draw(st.sampled_from([0, cuts[0]]))
    ends = [first, *[cut for cut in cuts if cut > first]]
    route = tuple(Hop(NODE, LayerRange(a, b), draw(st.integers(0, 9))) for a, b in pairwise(ends))
    n, start = draw(st.integers(0, 50)), draw(counts)
    ids = st.lists(st.integers(0, 1 << 30), max_size=32).map(tuple)
    return Step(
        plan=Plan(
            session=SESSION,
            attempt=draw(counts),
            prompt_len=draw(counts),
            digest=draw(st.text(max_size=128)),
            num_layers=ends[-1],
            route=route,
            origin=LayerRange(0, first) if first else None,
            entry=NODE,
            sampling=draw(
                st.builds(Sampling, floats, floats, st.integers(0, 100), logprobs=st.none() | st.integers(0, 20))
            ),
        ),
        seq=draw(counts),
        start=start,
        n=n,
        emit=draw(st.integers(0, min(n, 64))),
        remaining_ms=draw(counts),
        reserve_tokens=draw(counts),
        history=tuple(draw(st.lists(st.integers(0, 1 << 30), max_size=20))),
        trail=draw(traces),
        rows=draw(st.binary(max_size=200)),
        guess=draw(ids)[:n],
        recent=draw(ids)[:start],
    )


choices = st.builds(
    Choice,
    counts,
    counts,
    counts,
    st.floats(-100, 100),
    st.none() | st.floats(-100, 0),
    st.lists(st.tuples(counts, st.floats(-100, 0)), max_size=20).map(tuple),
)
ranges = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda ab: LayerRange(ab[0], ab[0] + ab[1]))
have = st.integers(0, 100)
others = st.one_of(
    st.builds(Need, st.just(SESSION), counts, counts, ranges, st.none() | ranges, have, st.integers(101, 1 << 20)),
    st.builds(Fill, st.just(SESSION), counts, counts, ranges, counts, st.integers(1, 4096), st.binary(max_size=99)),
    st.builds(
        Reply,
        st.just(SESSION),
        counts,
        counts,
        counts,
        st.lists(choices, max_size=8).map(tuple),
        traces,
        st.booleans(),
        st.lists(counts, max_size=8).map(tuple),
    ),
    st.builds(
        Open,
        st.just(SESSION),
        counts,
        st.builds(Hop, st.just(NODE), ranges, counts),
        st.text(max_size=128),
        st.text(max_size=64),
        counts,
        st.binary(max_size=20).map(lambda ids: ids * 4),
    ),
    st.builds(Opened, st.just(SESSION), counts, ranges, have),
    st.builds(Lost, st.just(SESSION), counts, st.just(NODE), ranges, st.sampled_from(Why), st.text(max_size=200)),
    st.builds(Ask, st.just(SESSION), counts, counts),
    st.builds(Progress, st.just(SESSION), counts, counts, ranges, st.sampled_from(Phase), have),
    st.builds(End, st.just(SESSION), counts),
)


@given(steps() | others)
def test_every_message_survives_the_wire(message: ChainMessage) -> None:
    wire = to_wire(message)
    head = msgpack.unpackb(msgpack.packb(dict(wire.head)))
    assert from_wire_untrusted(Message(wire.kind, head, wire.body)) == message


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=8,
)


@given(steps() | others, st.data())
def test_a_damaged_field_is_refused_or_harmless(message: ChainMessage, data: st.DataObject) -> None:
    wire = to_wire(message)
    name = data.draw(st.sampled_from(sorted(wire.head)))
    head = {**wire.head, name: data.draw(junk)}
    try:
        decoded = from_wire_untrusted(Message(wire.kind, head, data.draw(st.binary(max_size=30))))
    except BadFrame:
        return
    assert type(decoded) is type(message)


@pytest.mark.parametrize(
    "change",
    [
        {"route": []},
        {"route": [["f" * 32, 0, 4, 0], ["f" * 32, 5, 8, 0]]},
        {"route": [["f" * 32, 0, 4, 0]] * 33},
        {"route": [["f" * 32, 0, 7, 0]]},
        {"route": [["f" * 32, 1, 8, 0]]},
        {"n": 5000},
        {"emit": 2},
        {"history": 1},
        {"session": "../x"},
        {"entry": "nobody"},
        {"sampling": [float("nan"), 1.0, 0, 0.0, 0, 0.0, 0.0, 1.0, None]},
        {"start": True},
        {"trail": [[0.0, 0.0, 0]] * 33},
        {"plan": None},
        {"plan": "x"},
        {"plan": bytes(9000)},
        {"plan": msgpack.packb([])},
        {"plan": b"\xc1"},
    ],
)
def test_a_step_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    step = Step(
        plan=Plan(
            session=SESSION,
            attempt=1,
            prompt_len=1,
            digest="d",
            num_layers=8,
            route=(Hop(NODE, LayerRange(0, 8), 0),),
            origin=None,
            entry=NODE,
            sampling=Sampling(),
        ),
        seq=1,
        start=0,
        n=1,
        emit=1,
        remaining_ms=1,
        reserve_tokens=1,
    )
    wire = to_wire(step)
    from_wire_untrusted(wire)
    plan = msgpack.unpackb(wire.head["plan"])
    if change.keys() <= plan.keys():
        change = {"plan": msgpack.packb({**plan, **change})}
    with pytest.raises(BadFrame):
        from_wire_untrusted(Message(wire.kind, {**wire.head, **change}, wire.body))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(BadFrame):
        from_wire_untrusted(Message("chain.dance", {}))
