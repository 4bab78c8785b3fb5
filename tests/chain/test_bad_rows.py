"""Rows that no honest stage makes: whoever receives them names their sender, and the entry goes on without it."""

from __future__ import annotations

from meshd.chain.effects import Compute, Send
from meshd.chain.effects import HopEffect as Effect
from meshd.chain.hops import Failed, Held, Hops
from meshd.chain.messages import Fill, Lost, Need, Step, Why
from meshd.chain.plan import Plan
from meshd.inference.engine import Sampling
from meshd.vocabulary import Hop, LayerRange, NodeId, SessionId
from tests.chain.steps import changed

ENTRY, A, B, C = (NodeId(f"{i:032x}") for i in range(4))
SESSION = SessionId("a" * 32)
FIRST, MIDDLE = LayerRange(0, 4), LayerRange(4, 8)
BAD = Failed(Why.ROWS, "rows that are not finite")
STEP = Step(
    plan=Plan(
        session=SESSION,
        attempt=1,
        prompt_len=3,
        digest="d",
        num_layers=12,
        route=(Hop(B, MIDDLE, 7), Hop(C, LayerRange(8, 12), 1)),
        origin=FIRST,
        entry=ENTRY,
        sampling=Sampling(),
    ),
    seq=1,
    start=0,
    n=3,
    emit=1,
    remaining_ms=5000,
    reserve_tokens=259,
    rows=b"x" * 48,
)


def hops(held: LayerRange = MIDDLE) -> Hops:
    table = Hops(B)
    table.held = Held("d", held, 7)
    return table


def compute(effects: list[Effect]) -> Compute:
    (job,) = [effect for effect in effects if isinstance(effect, Compute)]
    return job


def lost(effects: list[Effect]) -> tuple[NodeId, Lost]:
    (effect,) = effects
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Lost)
    return effect.to, effect.message


def test_the_sender_of_a_step_is_named() -> None:
    table = hops()
    job = compute(table.receive(STEP, A, 10.0))
    to, message = lost(table.settle(job, BAD, 10.1))
    assert to == ENTRY
    assert (message.node, message.layers, message.why) == (A, FIRST, Why.ROWS)


def test_another_sender_is_taken_at_once() -> None:
    table = hops()
    table.settle(compute(table.receive(STEP, A, 10.0)), BAD, 10.1)
    again = compute(table.receive(changed(STEP, attempt=2, seq=2), C, 10.2))
    assert again.run.rows == STEP.rows


def test_the_sender_of_a_fill_is_named() -> None:
    table = hops()
    effects = table.receive(changed(STEP, start=3, n=1, rows=b"x" * 16), A, 10.0)
    (need,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Need)]
    fill = Fill(SESSION, need.attempt, need.seq, MIDDLE, 0, 3, b"y" * 48)
    job = compute(table.receive(fill, A, 10.1))
    _, message = lost(table.settle(job, BAD, 10.2))
    assert (message.node, message.layers, message.why) == (A, FIRST, Why.ROWS)


def test_what_the_entry_sent_accuses_nobody_else() -> None:
    table = hops(LayerRange(0, 4))
    step = changed(STEP, route=(Hop(B, FIRST, 7), Hop(C, LayerRange(4, 12), 1)), origin=None, rows=b"\0" * 12)
    job = compute(table.receive(step, ENTRY, 10.0))
    _, message = lost(table.settle(job, BAD, 10.1))
    assert (message.node, message.layers, message.why) == (B, FIRST, Why.ENGINE)
