"""Credit and order: nobody sends more than it was granted, a stream keeps its order, small goes first, bulk is not starved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import BadFrame
from meshd.links.flow import BULK_EVERY, STREAM_WINDOW_BYTES, Outbox, ReceiveWindow, SendWindow
from meshd.links.frame import MAX_CREDIT_BYTES, MAX_DATA_BYTES, Data, End, Ping


def data(stream: int, tag: int, size: int) -> Data:
    return Data(stream, bytes([tag % 256]) * size)


def test_a_receive_window_returns_credit_when_half_is_consumed() -> None:
    window = ReceiveWindow(100)
    window.charge(60)
    assert window.consume(49) == 0
    assert window.consume(11) == 60
    window.charge(100)
    with pytest.raises(BadFrame):
        window.charge(1)


def test_a_send_window_refuses_credit_beyond_reason() -> None:
    window = SendWindow(10)
    window.grant(MAX_CREDIT_BYTES - 10)
    with pytest.raises(BadFrame):
        window.grant(1)


def test_control_first_then_small_then_bulk() -> None:
    outbox = Outbox()
    for stream in (1, 3, 5):
        outbox.open(stream)
    bulk, small = data(1, 1, MAX_DATA_BYTES), data(3, 2, 10)
    outbox.push(bulk)
    outbox.push(small)
    outbox.control(Ping(1))
    assert [outbox.pop() for _ in range(4)] == [Ping(1), small, bulk, None]
    assert not outbox


def test_bulk_streams_take_turns() -> None:
    outbox = Outbox()
    for stream in (1, 3):
        outbox.open(stream)
        for tag in range(3):
            outbox.push(data(stream, tag, MAX_DATA_BYTES))
    order = []
    while (frame := outbox.pop()) is not None:
        assert isinstance(frame, Data)
        order.append(frame.stream)
    assert order == [1, 3, 1, 3, 1, 3]


def test_bulk_is_not_starved_by_small_frames() -> None:
    outbox = Outbox()
    outbox.open(1)
    outbox.open(3)
    outbox.push(data(1, 0, MAX_DATA_BYTES))
    for _ in range(BULK_EVERY + 5):
        outbox.push(data(3, 0, 1))
    popped = [outbox.pop() for _ in range(BULK_EVERY + 1)]
    assert data(1, 0, MAX_DATA_BYTES) in popped


def test_a_stream_without_credit_waits_and_lets_others_pass() -> None:
    outbox = Outbox()
    outbox.open(1)
    outbox.open(3)
    for tag in range(17):
        outbox.push(data(1, tag, MAX_DATA_BYTES))
    outbox.push(End(1))
    for _ in range(16):
        assert outbox.pop() is not None
    assert outbox.pop() is None
    outbox.push(data(3, 0, 5))
    assert outbox.pop() == data(3, 0, 5)
    assert outbox.pop() is None
    outbox.grant(1, MAX_DATA_BYTES)
    assert outbox.pop() == data(1, 16, MAX_DATA_BYTES)
    assert outbox.pop() == End(1)


def test_closing_drops_what_waits_and_late_credit_means_nothing() -> None:
    outbox = Outbox()
    outbox.open(1)
    outbox.push(data(1, 0, 100))
    outbox.close(1)
    assert outbox.pop() is None
    outbox.grant(1, 5)
    assert outbox.queued_bytes(1) == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from([1, 3, 5]), st.sampled_from([1, 500, 20_000, MAX_DATA_BYTES])),
            st.tuples(st.just("pop"), st.just(0), st.just(0)),
            st.tuples(st.just("grant"), st.sampled_from([1, 3, 5]), st.integers(1, 200_000)),
        ),
        max_size=120,
    )
)
def test_order_and_credit_hold_under_any_schedule(steps: list[tuple[str, int, int]]) -> None:
    outbox = Outbox()
    pushed: dict[int, list[Data]] = {1: [], 3: [], 5: []}
    popped: dict[int, list[Data]] = {1: [], 3: [], 5: []}
    credit = dict.fromkeys(pushed, STREAM_WINDOW_BYTES)
    for stream in pushed:
        outbox.open(stream)
    for tag, (what, stream, size) in enumerate(steps):
        if what == "push":
            pushed[stream].append(data(stream, tag, size))
            outbox.push(pushed[stream][-1])
        elif what == "grant":
            credit[stream] += size
            outbox.grant(stream, size)
        else:
            ready = bool(outbox)
            frame = outbox.pop()
            assert ready == (frame is not None)
            if isinstance(frame, Data):
                credit[frame.stream] -= len(frame.payload)
                popped[frame.stream].append(frame)
    for stream, left in credit.items():
        assert left >= 0
        assert popped[stream] == pushed[stream][: len(popped[stream])]
        waiting = pushed[stream][len(popped[stream]) :]
        assert outbox.queued_bytes(stream) == sum(len(frame.payload) for frame in waiting)
    while outbox.pop() is not None:
        pass
