"""Whole daemons under seeds: no wrong token, no lost range, no request without an end, and peace once the faults stop.

Seeds rotate from run to run; ``MESHD_SEED`` fixes the first one. Each batch is a process of its own: a run repeats only where
sets of text have one order. A failure prints the law that was broken and the last lines of the seed's trace.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

BASE = int(os.environ.get("MESHD_SEED", secrets.randbelow(1 << 30)))
BATCH = 10
SMALL = ("--nodes", "4", "--faults-s", "12", "--watch-s", "5")  # half a second of CPU to a second
TRACE_LINES = 150


def _run(first: int, count: int, *options: str) -> list[dict[str, Any]]:
    """The rows of so many seeds; fails with what was printed if a law was broken."""
    print(f"MESHD_SEED={BASE}: seeds {first}..{first + count - 1} {' '.join(options)}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.whole", str(first), "--count", str(count), *options],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith('{"seed"')]
    for row in rows:
        assert not row["broken"], "\n".join([*_of(lines, row), row["broken"]])
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(rows) == count
    return rows


def _of(lines: list[str], row: dict[str, Any]) -> list[str]:
    """The last lines of a seed's trace."""
    at = next(i for i, line in enumerate(lines) if line.startswith(f'{{"seed": {row["seed"]},'))
    return lines[max(0, at - TRACE_LINES) : at]


@pytest.mark.parametrize("batch", range(5))
def test_rotating_seeds(batch: int) -> None:
    rows = _run(BASE + batch * BATCH, BATCH, *SMALL)
    tally = sum((Counter({key: row.get(key, 0) for key in ("answered", "faults")}) for row in rows), Counter[str]())
    assert tally["answered"] > 2 * BATCH
    assert tally["faults"] > 2 * BATCH


def test_a_seed_repeats() -> None:
    first, again = (_run(BASE, 1, *SMALL)[0] for _ in range(2))
    assert (first["trace"], first["simulated_s"]) == (again["trace"], again["simulated_s"])


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(200))
def test_many_seeds(batch: int) -> None:
    _run(BASE + 1_000_000 + batch * BATCH, BATCH, *(() if batch % 10 == 0 else SMALL))
