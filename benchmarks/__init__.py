"""Every speed and memory claim of the README, rerunnable.

``python -m benchmarks [NAME …]`` runs them and writes JSON lines to ``benchmarks/results/NAME.jsonl`` and stdout. A row names the
machine's conditions; a claim is a ratio against a reference measured in the same run, because machines are noisy.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


class Recorder:
    """Writes rows of one benchmark."""

    def __init__(self, name: str) -> None:
        self.name = name
        RESULTS.mkdir(exist_ok=True)
        self._path = RESULTS / f"{name}.jsonl"

    def row(self, **fields: Any) -> None:
        """One measured fact. Floats are rounded to four places."""
        load1 = round(os.getloadavg()[0], 2)
        document = {"bench": self.name, "unix_s": int(time.time()), "cores": os.cpu_count(), "load1": load1, **fields}
        line = json.dumps(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in document.items()}
        )
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as out:
            out.write(line + "\n")


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """n, median, p95 and the largest."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50": round(statistics.median(ordered), 3),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 3),
        "max": round(ordered[-1], 3),
    }
