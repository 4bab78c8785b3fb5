"""The computing loop over a stage that counts: its batches, its errors, its answers."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="needs the engine extra")

from meshd.errors import (  # noqa: E402  # after the check for the extra
    BadFrame,
    BadTensor,
    Busy,
    ContextLengthExceeded,
    EngineFailed,
    NeedRows,
    PeerError,
    RangeNotHeld,
)
from meshd.inference import codec  # noqa: E402
from meshd.inference.codec import WorkerConfig  # noqa: E402
from meshd.inference.engine import Opening, Ran, Run, Sampling  # noqa: E402
from meshd.inference.worker.link import Call, Withdrawn  # noqa: E402
from meshd.inference.worker.loop import Loop  # noqa: E402
from meshd.inference.worker.stage import Item  # noqa: E402
from meshd.inference.worker.vitals import Vitals  # noqa: E402
from meshd.links.wire import Message  # noqa: E402
from meshd.vocabulary import LayerRange, SessionId  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB = 50
POISON = 13
WHOLE = LayerRange(0, 4)
FRONT = LayerRange(0, 2)
BACK = LayerRange(2, 4)


class CountingState:
    def __init__(self) -> None:
        self.have = 0
        self.sent = torch.zeros(0, 2)

    @property
    def nbytes(self) -> int:
        return 100 * self.have

    def truncate(self, n: int) -> None:
        self.have = min(self.have, n)

    def reserve(self, tokens: int) -> None:
        pass

    def bytes_for(self, tokens: int) -> int:
        return 100 * tokens

    def copy_from(self, source: CountingState, tokens: int) -> None:
        self.have, self.sent = tokens, source.sent[:tokens]

    def boundary(self, start: int, end: int) -> Any:
        if end > self.have:
            raise NeedRows(self.have)
        return self.sent[start:end]


class CountingStage:
    """Row p of an id t leaves as [t, p]; the head's logits are largest at t + 1."""

    layers = WHOLE
    num_layers = 4
    hidden_size = 2
    vocab_size = VOCAB
    dtype = "fp32"
    arith = "counting"
    packs = True

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.clock: Bench | None = None
        self.ms_per_row = 0.0

    def state(self, layers: LayerRange) -> CountingState:
        return CountingState()

    def step(self, layers: LayerRange, items: Sequence[Item], *, logits: bool) -> list[Any]:
        self.batches.append([item.n for item in items])
        if self.clock is not None:
            self.clock.now += self.ms_per_row * sum(item.n for item in items) / 1e3
        if any(POISON in item.rows for item in items):
            raise RuntimeError("poisoned")
        return [self._one(layers, item, logits=logits) for item in items]

    def _one(self, layers: LayerRange, item: Item, *, logits: bool) -> Any:
        state = cast(CountingState, item.state)
        assert state.have == item.start
        ids = item.rows if layers.start == 0 else item.rows[:, 0].long()
        rows = torch.stack([ids.float(), torch.arange(item.start, item.start + item.n).float()], dim=1)
        state.sent = torch.cat([state.sent[: item.start], rows])
        state.have = item.start + item.n
        emitted = rows[item.n - item.emit :]
        return self.lm_head(emitted) if logits and layers.end == 4 else emitted

    def forward(self, layers: LayerRange, rows: Any) -> Any:
        return torch.ones(len(rows), 2)

    def lm_head(self, rows: Any) -> Any:
        return torch.nn.functional.one_hot((rows[:, 0].long() + 1) % VOCAB, VOCAB).float()


@dataclass
class Desk:
    """Stands for the link: what goes in, what was answered."""

    inbox: deque[Call | Withdrawn] = field(default_factory=deque)
    replies: dict[int, Message | None] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    next_stream: int = 1
    waiting: int = 0

    def take(self, timeout_s: float) -> Sequence[Call | Withdrawn]:
        taken = list(self.inbox)
        self.inbox.clear()
        return taken

    def reply(self, stream: int, message: Message | None = None) -> None:
        assert stream not in self.replies | self.errors, "answered twice"
        self.replies[stream] = message

    def fail(self, stream: int, error: Exception) -> None:
        assert stream not in self.replies | self.errors, "answered twice"
        self.errors[stream] = error


class Bench:
    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.stage = CountingStage()
        self.desk = Desk()
        self.vitals = Vitals(lambda: self.now)
        settings = WorkerConfig("", WHOLE, **{"kv_budget_bytes": 100 * 1000, **config})
        self.loop = Loop(cast(Any, self.stage), self.desk, settings, self.vitals, lambda: self.now)

    def ask(self, message: Message) -> int:
        stream = self.desk.next_stream
        self.desk.next_stream += 2
        self.desk.inbox.append(Call(stream, message, self.now))
        return stream

    def run(self, session: str, start: int, ids: Sequence[int], **more: Any) -> int:
        given: dict[str, Any] = {"layers": FRONT, "emit": 1, "prompt_len": len(ids), **more}
        rows = given.pop("rows", struct.pack(f"<{len(ids)}i", *ids))
        return self.ask(codec.run_message(Run(SessionId(session), start=start, n=len(ids), rows=rows, **given)))

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn()

    def ran(self, stream: int) -> Ran:
        assert stream not in self.desk.errors, self.desk.errors[stream]
        reply = self.desk.replies[stream]
        assert reply is not None
        return codec.ran_untrusted(reply)

    def error(self, stream: int) -> Exception:
        return self.desk.errors[stream]


def floats(*rows: tuple[float, float]) -> bytes:
    return b"".join(struct.pack("<2f", *row) for row in rows)


def test_what_waits_runs_together_and_rows_come_back_to_whom_they_belong() -> None:
    bench = Bench()
    a, b = bench.run("a", 0, [5, 6], emit=2), bench.run("b", 0, [9])
    bench.turns()
    assert bench.stage.batches == [[2, 1]]
    assert bench.ran(a).rows == floats((5, 0), (6, 1))
    assert bench.ran(b).rows == floats((9, 0))
    assert bench.ran(b).batch == 2


def test_a_prompt_beside_somebody_who_decodes_takes_small_chunks() -> None:
    bench = Bench(prefill_rows=128)
    bench.stage.clock, bench.stage.ms_per_row = bench, 1.0
    bench.run("first", 0, [1] * 160)
    bench.turns(2)
    assert bench.stage.batches == [[128], [32]], "nobody decodes yet"
    bench.run("decoder", 0, [5])
    bench.turns()
    bench.run("second", 0, [1] * 288, prompt_len=288)
    for position in range(1, 6):
        bench.run("decoder", position, [5], prompt_len=1)
        bench.turns(position % 2 + 1)  # sometimes its next step is not here yet
    chunks = [max(batch) for batch in bench.stage.batches[3:]]
    assert set(chunks) == {32}
    bench.now += 1.0  # the decoder has gone
    bench.turns()
    assert bench.stage.batches[-1] == [288 - 32 * len(chunks)]


def test_a_long_run_is_computed_in_chunks_and_answered_once() -> None:
    bench = Bench(prefill_rows=32)
    ids = [i % 12 for i in range(100)]
    stream = bench.run("a", 0, ids, emit=60)
    bench.turns()
    decode = bench.run("b", 0, [7])
    bench.turns(3)
    assert bench.stage.batches == [[32], [1, 32], [32], [4]]
    assert bench.ran(stream).rows == floats(*[(ids[p], p) for p in range(40, 100)])
    assert bench.ran(decode).rows == floats((7, 0))


def test_tokens_are_drawn_at_the_models_end() -> None:
    bench = Bench()
    window = bench.run("a", 0, [5, 6, 7], layers=WHOLE, emit=2, sampling=Sampling(logprobs=1))
    bench.turns()
    choices = bench.ran(window).choices
    assert [(c.position, c.token) for c in choices] == [(2, 7), (3, 8)]
    plain = bench.run("a", 3, [8], layers=WHOLE)
    early = bench.run("b", 0, [8], sampling=Sampling())
    bench.turns()
    assert bench.ran(plain).rows == floats((8, 3)), "nothing to draw: the residual, as a probe wants it"
    assert isinstance(bench.error(early), BadTensor)


def test_draws_of_a_chunked_window_see_each_other() -> None:
    bench = Bench(prefill_rows=32)
    sampling = Sampling(presence_penalty=10.0)
    stream = bench.run("a", 0, [4] * 40, layers=WHOLE, emit=40, sampling=sampling)
    bench.turns(2)
    tokens = [c.token for c in bench.ran(stream).choices]
    assert tokens[0] == 5
    assert len(set(tokens)) == 40


PROMPT = [i % 12 for i in range(70)]


def asked_again(bench: Bench, session: str, row: bytes, **more: Any) -> Ran:
    """Open a session with `PROMPT`, all of which is kept, and run its last position alone."""
    opened = bench.ask(codec.open_message(opening_of(session, more["layers"])))
    bench.turns()
    reply = bench.desk.replies[opened]
    assert reply is not None
    assert reply.head == {"have": 69}
    stream = bench.run(session, 69, PROMPT[69:], rows=row, prompt_len=70, **more)
    bench.turns()
    return bench.ran(stream)


def opening_of(session: str, layers: LayerRange) -> Opening:
    return Opening(SessionId(session), layers, "somebody", struct.pack("<70i", *PROMPT), 70)


@pytest.mark.parametrize("layers", [BACK, FRONT])
def test_a_prompts_last_row_is_computed_once_for_all_who_ask_the_same(layers: LayerRange) -> None:
    bench = Bench(prefix_bytes=50_000)
    rows = [struct.pack("<2f", i, 7) if layers == BACK else struct.pack("<i", i) for i in PROMPT]
    bench.ask(codec.open_message(opening_of("first", layers)))
    first = bench.run("first", 0, PROMPT, layers=layers, emit=70, rows=b"".join(rows))
    bench.turns()
    end = bench.ran(first).rows[-8:]
    bench.ask(Message(codec.DROP, {"session": "first"}))
    bench.turns()
    computed = len(bench.stage.batches)
    again = asked_again(bench, "again", rows[69], layers=layers)
    assert (again.rows, again.compute_ms, len(bench.stage.batches)) == (end, 0.0, computed)
    goes_on = bench.run("again", 70, [5], layers=layers, rows=rows[5], prompt_len=70)
    bench.turns()
    assert bench.ran(goes_on).rows == floats((5, 70)), "and what follows goes on from there"
    other = asked_again(bench, "other", rows[3], layers=layers)  # the stage before computes in another way now
    assert (other.rows, len(bench.stage.batches)) == (floats((3, 69)), computed + 2)


def test_what_is_drawn_of_a_known_last_row_is_each_requests_own() -> None:
    bench = Bench(prefix_bytes=50_000)
    row = struct.pack("<i", PROMPT[69])
    bench.ask(codec.open_message(opening_of("first", WHOLE)))
    bench.run("first", 0, PROMPT, layers=WHOLE, sampling=Sampling())
    bench.turns()
    bench.ask(Message(codec.DROP, {"session": "first"}))
    bench.turns()
    computed = len(bench.stage.batches)
    drawn = [
        asked_again(bench, f"again {seed}", row, layers=WHOLE, sampling=Sampling(temperature=5.0, seed=seed)).choices
        for seed in range(10)
    ]
    assert len(bench.stage.batches) == computed
    assert {choice.position for choices in drawn for choice in choices} == {70}
    assert len({choice.token for choices in drawn for choice in choices}) > 5
    residual = asked_again(bench, "probe", row, layers=WHOLE)
    assert residual.rows == floats((PROMPT[69], 69)), "logits are no residual"


def test_one_bad_run_does_not_hurt_its_company() -> None:
    bench = Bench()
    good, bad, also_good = bench.run("a", 0, [1]), bench.run("b", 0, [POISON]), bench.run("c", 0, [2])
    bench.turns()
    assert bench.ran(good).rows == floats((1, 0))
    assert bench.ran(also_good).rows == floats((2, 0))
    error = bench.error(bad)
    assert isinstance(error, EngineFailed)
    assert "poisoned" in error.message
    retried = bench.run("b", 0, [3])
    bench.turns()
    assert bench.ran(retried).rows == floats((3, 0))


def test_outcomes_that_are_errors() -> None:
    bench = Bench(context=200)
    gap = bench.run("a", 5, [1])
    foreign = bench.run("b", 0, [1], layers=LayerRange(0, 9))
    short = bench.run("c", 0, [1], rows=b"xyz")
    unknown = bench.run("d", 0, [VOCAB])
    negative = bench.run("e", 0, [-1])
    infinite = bench.run("f", 0, [1], layers=BACK, rows=floats((float("inf"), 0)))
    far = bench.run("g", 200, [1])
    big = bench.run("h", 0, [1], reserve_tokens=5000)
    odd = bench.ask(Message("dance"))
    torn = bench.ask(Message(codec.RUN, {}))
    fine = bench.run("i", 0, [1])
    bench.turns()
    error = bench.error(gap)
    assert isinstance(error, NeedRows)
    assert error.have == 0
    wrong = bench.error(foreign)
    assert isinstance(wrong, RangeNotHeld)
    assert wrong.held == WHOLE
    for stream in (short, unknown, negative, infinite):
        assert isinstance(bench.error(stream), BadTensor)
    assert isinstance(bench.error(far), ContextLengthExceeded)
    assert isinstance(bench.error(big), Busy)
    assert isinstance(bench.error(odd), PeerError)
    assert isinstance(bench.error(torn), BadFrame)
    assert bench.ran(fine).rows == floats((1, 0))


def test_a_device_that_becomes_slow_takes_smaller_chunks() -> None:
    bench = Bench()
    bench.stage.clock = bench
    bench.stage.ms_per_row = 10.0
    bench.run("a", 0, [1] * 600)
    bench.turns(12)
    chunks = [n for batch in bench.stage.batches for n in batch]
    assert chunks[0] == 128
    assert chunks[-2] == 32
    assert sum(chunks) <= 600


def test_waiting_is_told_apart_from_computing() -> None:
    bench = Bench()
    stream = bench.run("a", 0, [1])
    bench.now = 0.25
    bench.turns()
    assert (bench.ran(stream).queue_ms, bench.ran(stream).compute_ms) == (250.0, 0.0)


def test_a_full_queue_is_busy() -> None:
    bench = Bench(max_queue=2)
    streams = [bench.run(name, 0, [1]) for name in "abc"]
    bench.turns()
    assert isinstance(bench.error(streams[2]), Busy)
    assert len(bench.desk.replies) == 2


def test_a_run_of_no_rows_asks_what_is_there() -> None:
    bench = Bench()
    bench.run("a", 0, [1, 2, 3])
    known = bench.run("a", 3, [], emit=0, prompt_len=3)
    unknown = bench.run("b", 3, [], emit=0, prompt_len=3)
    bench.turns(2)
    assert bench.ran(known) == Ran(queue_ms=0.0)
    assert isinstance(bench.error(unknown), NeedRows)


def test_boundary_rows_drop_and_withdrawal() -> None:
    bench = Bench()
    bench.run("a", 0, [1, 2, 3])
    bench.turns()
    head = {"session": "a", "layers": FRONT.json(), "start": 1, "end": 3}
    sent = bench.ask(Message(codec.BOUNDARY, head))
    ahead = bench.ask(Message(codec.BOUNDARY, {**head, "end": 4}))
    other = bench.ask(Message(codec.BOUNDARY, {**head, "layers": WHOLE.json()}))
    bench.turns()
    reply = bench.desk.replies[sent]
    assert reply is not None
    assert reply.body == floats((2, 1), (3, 2))
    error = bench.error(ahead)
    assert isinstance(error, NeedRows)
    assert error.have == 3
    assert isinstance(bench.error(other), NeedRows)
    late = bench.run("a", 3, [4])
    dropped = bench.ask(Message(codec.DROP, {"session": "a"}))
    left = bench.run("b", 0, [5])
    bench.desk.inbox.append(Withdrawn(left))
    bench.turns(2)
    assert dropped in bench.desk.replies
    assert isinstance(bench.error(late), NeedRows)
    assert left not in bench.desk.replies | bench.desk.errors
    assert bench.vitals.kv_used == 0


def test_stateless_calls() -> None:
    bench = Bench()
    forward = bench.ask(Message(codec.FORWARD, {"layers": FRONT.json(), "n": 2}, struct.pack("<2i", 1, 2)))
    logits = bench.ask(Message(codec.LM_HEAD, {"n": 1}, floats((3, 0))))
    wrong = bench.ask(Message(codec.LM_HEAD, {"n": 2}, floats((3, 0))))
    bench.turns(3)
    answer = bench.desk.replies[forward]
    assert answer is not None
    assert answer.body == floats((1, 1), (1, 1))
    head = bench.desk.replies[logits]
    assert head is not None
    assert len(head.body) == 4 * VOCAB
    assert isinstance(bench.error(wrong), BadTensor)


def test_silent_sessions_end_and_vitals_tell() -> None:
    bench = Bench()
    bench.run("a", 0, [1, 2, 3], prompt_len=1)
    bench.turns()
    assert (bench.vitals.sessions, bench.vitals.runs, bench.vitals.rows) == (1, 1, 3)
    assert bench.vitals.tokens_per_s > 0
    assert codec.health_untrusted(bench.vitals.snapshot()).kv_used_bytes == 300
    tick = bench.vitals.tick
    bench.now = 60.0
    bench.turns()
    assert bench.vitals.sessions == 0
    assert bench.vitals.tokens_per_s == 0
    assert bench.vitals.tick == tick + 1
