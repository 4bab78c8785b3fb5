"""Rows that no honest stage makes: whoever receives them names their sender, and the entry goes on without it."""

from __future__ import annotations

from meshd.chain.effects import Compute, Send
from meshd.chain.effects import HopEffect as Effect
from meshd.chain.hops import Failed, Held, Hops
from meshd.chain.messages import Fill, Lost, Need, Why
from meshd.vocabulary import Hop, LayerRange, NodeId
from tests.chain.steps import ENTRY, MIDDLE, SESSION, STEP, A, B, C, changed

FIRST = LayerRange(0, 4)
BAD = Failed(Why.ROWS, "rows that are not finite")


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
