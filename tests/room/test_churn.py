"""An hour of churn and load: what never dies must not grow. `make soak SOAK_MINUTES=10` for less."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshd.cli.chaos.box import Box, boxed
from meshd.cli.chaos.experiment import Experiment, Load, trace
from meshd.cli.chaos.netlab import lacking
from meshd.cli.chaos.schedule import Plan
from meshd.vocabulary import LayerRange
from tests.rooms import FLAGS, LAYERS, PATIENCE_S, mapped_bytes, tried

MODEL = f"hash:{LAYERS},step_ms=60,layer_mb=1"
HALVES = LayerRange(0, LAYERS // 2), LayerRange(LAYERS // 2, LAYERS)
PLACES: dict[str, LayerRange | None] = {**{f"n{i + 1}": HALVES[i % 2] for i in range(5)}, "e0": None}
SAFE = frozenset({"n1", "e0"})
SAMPLE_S = 5.0
Series = list[tuple[float, float]]


def growth(series: Sequence[tuple[float, float]]) -> float:
    """What a straight line through all but the first quarter gains over the whole time."""
    settled = series[len(series) // 4 :]
    times, values = [at for at, _ in settled], [value for _, value in settled]
    mean_at, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - mean_at) ** 2 for at in times)
    slope = sum((at - mean_at) * (value - mean) for at, value in settled) / spread
    return slope * (series[-1][0] - series[0][0])


def test_growth_is_what_a_line_gains() -> None:
    assert growth([(float(t), 5.0 + 2.0 * t) for t in range(41)]) == pytest.approx(80.0)
    assert growth([(float(t), 100.0 - t if t < 10 else 7.0 + t % 2) for t in range(41)]) == pytest.approx(0.0, abs=0.5)


class Watch:
    """Samples memory, descriptors and tasks of the daemons that are never struck."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self.series: dict[tuple[str, str], Series] = defaultdict(list)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        began = time.monotonic()
        with self._box.inside():
            while not self._over.wait(SAMPLE_S):
                for name in SAFE:
                    self._sample(name, time.monotonic() - began)

    def _sample(self, name: str, at_s: float) -> None:
        process = self._box.room.nodes[name].process
        assert process is not None
        with self._box.room.client(name, timeout_s=5.0) as client:
            text = tried(lambda: client.text("/metrics"))
        if text is not None:
            tasks = next(line.split()[1] for line in text.splitlines() if line.startswith("meshd_tasks "))
            self.series[name, "tasks"].append((at_s, float(tasks)))
        self.series[name, "bytes"].append((at_s, float(mapped_bytes(process.pid, "VmRSS"))))
        self.series[name, "files"].append((at_s, float(len(list(Path(f"/proc/{process.pid}/fd").iterdir())))))


@pytest.mark.soak
@pytest.mark.daemon
@pytest.mark.netns
@pytest.mark.skipif(bool(lacking()), reason=lacking() or "has all it needs")
def test_an_hour_of_churn_leaves_nothing_behind() -> None:
    seconds = 60.0 * float(os.environ.get("SOAK_MINUTES", "60"))
    load = Load(["Tell me of the sea. " * 4, "Count the stars: " * 4], clients=4, calm_s=5.0, after_s=30.0)
    plan = Plan(seconds, every_s=4.0, safe=SAFE)
    with boxed(MODEL, PLACES, *FLAGS) as box, Watch(box) as watch:
        report = Experiment(box, PLACES, plan, load, seed=int(os.environ.get("SOAK_SEED", "1"))).run()
        assert not report.faults(), [trace(report, asked, box) for _, asked in report.faults()[:3]]
    assert report.hanging == 0
    for (name, what), series in watch.series.items():
        first = series[len(series) // 4][1]
        allowed = {"bytes": 0.05 * first + (2 << 20), "files": 8.0, "tasks": 0.1 * first + 16.0}[what]
        assert growth(series) < allowed, (name, what, growth(series), series[:: max(1, len(series) // 50)])
