"""A step as the middle hop of three gets it, and steps that differ from one in a field or two, of their own or of their plan."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from meshd.chain.messages import Step
from meshd.chain.plan import Plan
from meshd.inference.engine import Sampling
from meshd.vocabulary import Hop, LayerRange, NodeId, SessionId

ENTRY, A, B, C = (NodeId(f"{i:032x}") for i in range(4))
SESSION = SessionId("a" * 32)
MIDDLE = LayerRange(4, 8)
STEP = Step(
    plan=Plan(
        session=SESSION,
        attempt=1,
        prompt_len=3,
        digest="d",
        num_layers=12,
        route=(Hop(B, MIDDLE, 7), Hop(C, LayerRange(8, 12), 1)),
        origin=LayerRange(0, 4),
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

_PLANNED = {field.name for field in fields(Plan)}


def changed(step: Step, **change: Any) -> Step:
    """``step`` with other fields."""
    plan = replace(step.plan, **{name: change.pop(name) for name in _PLANNED & change.keys()})
    return replace(step, plan=plan, **change)
