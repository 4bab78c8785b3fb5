"""Steps that differ from another in a field or two, of their own or of their plan."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from meshd.chain.messages import Step
from meshd.chain.plan import Plan

_PLANNED = {field.name for field in fields(Plan)}


def changed(step: Step, **change: Any) -> Step:
    """``step`` with other fields."""
    plan = replace(step.plan, **{name: change.pop(name) for name in _PLANNED & change.keys()})
    return replace(step, plan=plan, **change)
