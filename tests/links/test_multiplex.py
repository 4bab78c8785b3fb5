"""Two ends of a link without a socket: messages arrive whole and in order, and a peer cannot make the other end grow."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.errors import BadFrame, Busy, LinkLost, NeedRows
from meshd.links.frame import (
    MAX_BODY_BYTES,
    Cancel,
    Data,
    End,
    Err,
    FrameDecoder,
    Goaway,
    Head,
    Ping,
    Pong,
    encode,
)
from meshd.links.multiplex import (
    MAX_STREAMS,
    MAX_UNFETCHED,
    Arrived,
    Cancelled,
    Ended,
    Event,
    Failed,
    GoingAway,
    Multiplexer,
    Opened,
    Pinged,
    Ponged,
)
from meshd.links.wire import Message


def pair() -> tuple[Multiplexer, Multiplexer]:
    return Multiplexer(dialler=True), Multiplexer(dialler=False)


def pass_on(source: Multiplexer, target: Multiplexer) -> list[Event]:
    """Everything that may go now."""
    events: list[Event] = []
    while raw := source.next_bytes():
        events += target.receive_untrusted(raw)
    return events


def raw(*sent: Head | Data | End | Cancel | Ping | Err) -> bytes:
    return b"".join(bytes(buffer) for frame in sent for buffer in encode(frame))


def test_a_request_and_its_answer() -> None:
    a, b = pair()
    stream = a.open(Message("ask", {"n": 1}, b"rows"))
    a.end(stream)
    opened, ended = pass_on(a, b)
    assert isinstance(opened, Opened)
    assert opened.inbound.message == Message("ask", {"n": 1}, b"rows")
    assert ended == Ended(stream)
    b.consumed(stream, opened.inbound)
    b.send(stream, Message("answer", {}, b"x" * 300_000))
    b.end(stream)
    arrived, over = pass_on(b, a)
    assert isinstance(arrived, Arrived)
    assert arrived.inbound.message.body == b"x" * 300_000
    assert over == Ended(stream)
    assert a.streams == b.streams == 0


def test_a_body_larger_than_the_window_needs_no_reader() -> None:
    a, b = pair()
    body = bytes(6 << 20)
    a.open(Message("bulk", {}, body))
    events: list[Event] = []
    for _ in range(100):
        events += pass_on(a, b)
        pass_on(b, a)
    (opened,) = events
    assert isinstance(opened, Opened)
    assert opened.inbound.message.body == body


def test_unread_messages_stop_the_sender_until_they_are_read() -> None:
    a, b = pair()
    stream = a.open(Message("first"))
    for n in range(64):
        a.send(stream, Message("next", {"n": n}, bytes(60_000)))
    inbox: deque[Opened | Arrived] = deque()

    def exchange() -> None:
        for _ in range(40):
            inbox.extend(event for event in pass_on(a, b) if isinstance(event, (Opened, Arrived)))
            pass_on(b, a)

    exchange()
    assert len(inbox) < 30
    seen = []
    while inbox:
        event = inbox.popleft()
        b.consumed(stream, event.inbound)
        seen.append(event.inbound.message.head.get("n"))
        exchange()
    assert seen == [None, *range(64)]


def test_an_error_arrives_as_its_class_after_the_messages_before_it() -> None:
    a, b = pair()
    stream = a.open(Message("step"))
    pass_on(a, b)
    b.send(stream, Message("part"))
    b.fail(stream, NeedRows(17))
    arrived, failed = pass_on(b, a)
    assert isinstance(arrived, Arrived)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, NeedRows)
    assert failed.error.have == 17
    assert a.streams == b.streams == 0


def test_cancel_drops_what_waits_and_tells_the_peer() -> None:
    a, b = pair()
    stream = a.open(Message("long", {}, bytes(3 << 20)))
    b.receive_untrusted(a.next_bytes())
    a.cancel(stream)
    assert pass_on(a, b) == [Cancelled(stream)]
    assert a.streams == b.streams == 0
    assert pass_on(b, a) == []


def test_a_stream_that_never_left_is_not_cancelled_at_the_peer() -> None:
    a, b = pair()
    a.cancel(a.open(Message("never")))
    assert not a.has_output
    kept = a.open(Message("kept"))
    (opened,) = pass_on(a, b)
    assert isinstance(opened, Opened)
    assert opened.stream == kept


def test_frames_of_a_closed_stream_are_ignored() -> None:
    a, b = pair()
    stream = a.open(Message("ask"))
    pass_on(a, b)
    b.send(stream, Message("late", {}, b"x" * 100))
    b.end(stream)
    late = b.next_bytes()
    a.cancel(stream)
    assert a.receive_untrusted(late) == []


def test_streams_reach_the_peer_in_the_order_they_were_opened() -> None:
    a, b = pair()
    opened = [a.open(Message("m", {"pad": bytes(15_000 * (n % 2))}, bytes(200_000 * (n % 3)))) for n in range(20)]
    events: list[Event] = []
    for _ in range(200):
        events += pass_on(a, b)
        pass_on(b, a)
    assert sorted(event.stream for event in events if isinstance(event, Opened)) == opened


@pytest.mark.parametrize(
    "hostile",
    [
        raw(Data(1, b"x")),
        raw(Head(2, "k", {}, 0)),
        raw(Head(1, "k", {}, 5), Head(1, "k", {}, 0)),
        raw(Head(1, "k", {}, 1), Data(1, b"xx")),
        raw(Head(1, "k", {}, 0), Data(1, b"x")),
        raw(Head(1, "k", {}, 5), End(1)),
        raw(Head(1, "k", {}, 0), End(1), Head(1, "k", {}, 0)),
    ],
)
def test_what_is_out_of_place_is_a_bad_frame(hostile: bytes) -> None:
    b = Multiplexer(dialler=False)
    with pytest.raises(BadFrame):
        b.receive_untrusted(hostile)


def test_messages_beyond_the_credit_are_a_bad_frame() -> None:
    b = Multiplexer(dialler=False)
    with pytest.raises(BadFrame, match="credit"):
        b.receive_untrusted(raw(*[Head(1, "k", {}, 0)] * 8000))


def test_streams_above_the_bound_are_refused_and_the_link_lives() -> None:
    b = Multiplexer(dialler=False)
    b.receive_untrusted(raw(*[Head(1 + 2 * n, "k", {}, 0) for n in range(MAX_STREAMS + 1)]))
    assert b.streams == MAX_STREAMS
    (refusal,) = FrameDecoder().feed_untrusted(b.next_bytes())
    assert isinstance(refusal, Err)
    assert (refusal.stream, refusal.code) == (1 + 2 * MAX_STREAMS, "busy")
    a = Multiplexer(dialler=True)
    for _ in range(MAX_STREAMS):
        a.open(Message("k"))
    with pytest.raises(Busy):
        a.open(Message("k"))


def test_declared_bodies_above_the_links_budget_are_refused() -> None:
    b = Multiplexer(dialler=False)
    events = b.receive_untrusted(raw(*[Head(1 + 2 * n, "k", {}, MAX_BODY_BYTES) for n in range(5)]))
    (failed,) = events
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Busy)
    assert b.receive_untrusted(raw(Cancel(1))) == [Cancelled(1)]
    assert b.receive_untrusted(raw(Head(11, "k", {}, MAX_BODY_BYTES))) == []
    assert b.streams == 4


def test_a_peer_that_asks_and_never_reads_is_cut() -> None:
    b = Multiplexer(dialler=False)
    for nonce in range(MAX_UNFETCHED + 1):
        b.receive_untrusted(raw(Ping(nonce)))
        b.pong(nonce, {})
    with pytest.raises(BadFrame, match="read"):
        b.receive_untrusted(raw(Ping(0)))


def test_pings_carry_state_and_go_first() -> None:
    a, b = pair()
    a.open(Message("bulk", {}, bytes(200_000)))
    a.ping(5)
    assert b.receive_untrusted(a.next_bytes(1)) == [Pinged(5)]
    b.pong(5, {"tick": 3})
    assert pass_on(b, a) == [Ponged(5, {"tick": 3})]


def test_after_goaway_running_streams_finish_and_new_ones_are_refused() -> None:
    a, b = pair()
    running = a.open(Message("running"))
    pass_on(a, b)
    crossing = a.open(Message("crossing"))
    b.goaway("drain")
    pass_on(a, b)
    b.send(running, Message("answer"))
    events = pass_on(b, a)
    assert events[0] == GoingAway("drain")
    assert any(isinstance(event, Arrived) and event.stream == running for event in events)
    assert any(isinstance(event, Failed) and event.stream == crossing for event in events)
    with pytest.raises(LinkLost, match="drain"):
        a.open(Message("new"))


@dataclass
class End_:  # noqa: N801  # the name End is the frame's
    mux: Multiplexer
    sent: dict[int, list[bytes]] = field(default_factory=dict)
    got: dict[int, list[bytes]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    wire: bytes = b""

    def take(self, raw_bytes: bytes) -> None:
        for event in self.mux.receive_untrusted(raw_bytes):
            if isinstance(event, (Opened, Arrived)):
                self.got.setdefault(event.stream, []).append(event.inbound.message.body)
                self.mux.consumed(event.stream, event.inbound)
            elif isinstance(event, Ended):
                self.ended.add(event.stream)


steps = st.lists(
    st.tuples(st.sampled_from(["open", "send", "end", "write", "read"]), st.integers(0, 1), st.integers(0, 2**20)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_any_interleaving_delivers_every_message_once_and_in_order(script: list[tuple[str, int, int]]) -> None:
    ends = [End_(Multiplexer(dialler=True)), End_(Multiplexer(dialler=False))]
    ended: list[set[int]] = [set(), set()]
    for tag, (what, who, size) in enumerate(script):
        me, other = ends[who], ends[1 - who]
        body = bytes([tag]) * (size % 150_000)
        live = [s for s in (*me.sent, *me.got) if s not in ended[who]]
        if what == "open":
            me.sent.setdefault(me.mux.open(Message("m", {}, body)), []).append(body)
        elif what == "send" and live:
            stream = live[size % len(live)]
            me.mux.send(stream, Message("m", {}, body))
            me.sent.setdefault(stream, []).append(body)
        elif what == "end" and live:
            stream = live[size % len(live)]
            me.mux.end(stream)
            ended[who].add(stream)
        elif what == "write":
            me.wire += me.mux.next_bytes(1 + size)
        elif what == "read":
            cut = size % (len(other.wire) + 1)
            other.wire, part = other.wire[cut:], other.wire[:cut]
            me.take(part)
    while any(end.wire or end.mux.has_output for end in ends):
        for me, other in (ends, ends[::-1]):
            me.wire += me.mux.next_bytes()
            other.take(me.wire)
            me.wire = b""
    for who, (me, other) in enumerate((ends, ends[::-1])):
        assert other.got == {stream: bodies for stream, bodies in me.sent.items() if bodies}
        assert other.ended == ended[who]
        for stream in ended[0] & ended[1]:
            assert not me.mux.is_live(stream)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.data())
def test_mutated_traffic_raises_only_bad_frame(noise: bytes, data: st.DataObject) -> None:
    a, b = pair()
    a.open(Message("m", {"k": 1}, noise))
    a.ping(1)
    a.end(1)
    sent = bytearray(a.next_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        b.receive_untrusted(bytes(sent) + noise)
    except BadFrame:
        return


def test_a_pong_that_may_not_travel_fails_its_maker() -> None:
    with pytest.raises(ValueError, match="may not travel"):
        Multiplexer(dialler=True).pong(1, {"a": "x" * 999})
    assert encode(Pong(1, {}))
    assert encode(Goaway("bye"))
