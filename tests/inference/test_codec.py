from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.errors import BadFrame
from meshd.inference import codec
from meshd.inference.codec import Loaded, WorkerConfig
from meshd.inference.engine import Choice, Ran, Run, Sampling
from meshd.links.frame import FrameDecoder, encode, message_frames
from meshd.links.wire import Message
from meshd.vocabulary import LayerRange, SessionId

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
ids = st.integers(0, (1 << 32) - 1)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 1 << 31),
    min_p=st.floats(0, 1),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 10),
    logprobs=st.none() | st.integers(0, 20),
)
choices = st.builds(
    Choice,
    position=ids,
    token=ids,
    argmax=ids,
    logit=finite,
    logprob=st.none() | finite,
    top=st.lists(st.tuples(ids, finite), max_size=5).map(tuple),
)
layer_ranges = st.tuples(st.integers(0, 100), st.integers(1, 100)).map(lambda p: LayerRange(p[0], p[0] + p[1]))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    n = draw(st.integers(1, 100))
    return Run(
        session=SessionId(draw(st.text("0123456789abcdef", min_size=32, max_size=32))),
        layers=draw(layer_ranges),
        start=draw(st.integers(0, 10000)),
        n=n,
        emit=draw(st.integers(0, n)),
        prompt_len=draw(st.integers(0, 10000)),
        rows=draw(st.binary(max_size=200)),
        reserve_tokens=draw(st.integers(0, 10000)),
        sampling=draw(st.none() | samplings),
        history=tuple(draw(st.lists(ids, max_size=20))),
    )


def over_the_wire(message: Message) -> Message:
    """The message as the other end sees it: heads become msgpack and back."""
    raw = b"".join(bytes(b) for frame in message_frames(1, message) for b in encode(frame))
    head, *data = FrameDecoder().feed_untrusted(raw)
    return Message(head.kind, head.head, b"".join(bytes(d.payload) for d in data))  # type: ignore[union-attr]  # HEAD, DATA...


@settings(deadline=None)
@given(runs())
def test_run_survives_the_wire(run: Run) -> None:
    assert codec.run_untrusted(over_the_wire(codec.run_message(run))) == run


@settings(deadline=None)
@given(st.lists(choices, max_size=10), st.binary(max_size=100), st.floats(0, 1e6), st.integers(1, 64))
def test_ran_survives_the_wire(drawn: list[Choice], rows: bytes, ms: float, batch: int) -> None:
    ran = Ran(rows=b"" if drawn else rows, choices=tuple(drawn), compute_ms=ms, queue_ms=ms, batch=batch)
    assert codec.ran_untrusted(over_the_wire(codec.ran_message(ran))) == ran


def test_load_and_its_answer_survive_the_wire() -> None:
    config = WorkerConfig("/" + "very-long/" * 40, LayerRange(3, 9), dtype="bf16", private_budget_bytes=5)
    assert codec.config_untrusted(over_the_wire(codec.load_message(config))) == config
    loaded = Loaded("bfloat16", "a1", True, 8, 9, 0.5, 1.5, 0, ("x" * 1000,))
    assert codec.loaded_untrusted(over_the_wire(codec.loaded_message(loaded))) == loaded


@pytest.mark.parametrize(
    "change",
    [
        {"n": -1},
        {"n": True},
        {"n": "3"},
        {"emit": 4},
        {"start": -1},
        {"layers": [3, 3]},
        {"layers": [0]},
        {"layers": "ab"},
        {"session": ""},
        {"session": "x" * 65},
        {"session": 5},
        {"history": 100},
        {"sampling": []},
        {"sampling": {"temperature": math.nan}},
    ],
)
def test_a_run_that_is_none_is_refused(change: dict[str, object]) -> None:
    good = codec.run_message(Run(SessionId("s"), LayerRange(0, 2), 0, 3, 1, 3, bytes(12)))
    with pytest.raises(BadFrame):
        codec.run_untrusted(Message("run", {**good.head, **change}, good.body))


@given(st.binary(max_size=100), st.integers(0, 5))
def test_choices_from_any_bytes_raise_only_badframe(raw: bytes, count: int) -> None:
    try:
        decoded = codec.choices_untrusted(raw, count)
    except BadFrame:
        return
    assert codec.pack_choices(decoded) == raw or any(c.logprob is None for c in decoded)


def test_health_of_a_worker_that_says_little() -> None:
    health = codec.health_untrusted({"tick": 3, "new": "?"})
    assert (health.tick, health.queue_depth, health.alive) == (3, 0, True)
    with pytest.raises(BadFrame):
        codec.health_untrusted({"busy_ms": -1})
