"""A room of hosts with addresses of their own, struck at random: a sample of what `python -m benchmarks room` does."""

from __future__ import annotations

import pytest

from meshd.cli.chaos.box import boxed
from meshd.cli.chaos.experiment import Experiment, Load, trace
from meshd.cli.chaos.netlab import lacking
from meshd.cli.chaos.schedule import Plan
from meshd.vocabulary import LayerRange
from tests.rooms import FLAGS, LAYERS, MODEL, PATIENCE_S, PROMPT, expected

pytestmark = [
    pytest.mark.daemon,
    pytest.mark.netns,
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "has all it needs"),
]
HALVES = LayerRange(0, LAYERS // 2), LayerRange(LAYERS // 2, LAYERS)
PLACES = {f"n{i + 1}": HALVES[i % 2] for i in range(4)}
SETTLE_S = 4.0


def test_every_answer_is_right_whatever_is_struck() -> None:
    load = Load([PROMPT], max_tokens=24, clients=2, calm_s=0.0, after_s=0.5, patience_s=PATIENCE_S)
    plan = Plan(8.0, every_s=1.0, settle_s=SETTLE_S)
    with boxed(MODEL, PLACES, *FLAGS) as box:
        report = Experiment(box, PLACES, plan, load, seed=7).run()
        assert not report.faults(), [trace(report, asked, box) for _, asked in report.faults()]
    assert report.expected == [tuple(expected(PROMPT, 24))]
    assert len(report.answers) > 2
    assert len({one.kind for one in report.done}) > 1
    assert report.hanging == 0
