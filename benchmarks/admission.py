"""Admission: what probes of SmolLM2-135M measure for honest stages and for every single broken layer."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

from benchmarks import Recorder
from meshd.admission.expected import RecordedModel
from meshd.config import default_state_dir
from meshd.models.builtin import NAME
from meshd.models.store import ModelStore
from meshd.vocabulary import LayerRange, ModelSpec
from tests.admission.smollm2_probe import expectation, probe
from tests.admission.stage_engine import StageEngine, spoil, stage_of

RANGES = tuple(
    LayerRange(*pair) for pair in ((0, 30), (0, 15), (15, 30), (7, 22), (10, 20), (0, 1), (29, 30), (10, 12))
)
HONEST: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16 prepacked": {"prepack": "on"},
    "bf16 two threads": {"threads": 2},
    "bf16 not deterministic": {"deterministic": False},
    "fp32": {"dtype": "fp32", "deterministic": False},
    "int8": {"dtype": "int8"},
}
PROBES = 6


def run() -> None:
    """A row for each kind of stage and range: errors, how many passed, milliseconds a probe."""
    model = ModelStore.under(Path(os.environ.get("MESHD_STATE_DIR") or default_state_dir())).get(NAME)
    out = Recorder("admission")
    with tempfile.TemporaryDirectory() as scratch:
        expected, spec = expectation(model.path, Path(scratch))
    for name, how in HONEST.items():
        stage = stage_of(model.path, **{"threads": 1, **how})
        for layers in RANGES:
            _row(out, name, [StageEngine(stage, spec, layers)] * PROBES, expected, layers)
    stage = stage_of(model.path, threads=1)
    for layers in RANGES[:5]:
        for fault in ("skip", "double", "swap"):
            engines = [StageEngine(stage, spec, layers, fault=fault, at=at) for at in _places(fault, layers)]
            _row(out, f"one layer: {fault}", engines, expected, layers)
        for fault in ("shift", "stale"):
            _row(out, fault, [StageEngine(stage, spec, layers, fault=fault)] * PROBES, expected, layers)
    _other_revision(out, model.path, spec, expected)


def _places(fault: str, layers: LayerRange) -> Iterator[int]:
    yield from range(layers.start, layers.end - (fault == "swap"))


def _other_revision(out: Recorder, folder: Path, spec: ModelSpec, expected: RecordedModel) -> None:
    for share in (0.03, 0.1):
        stage = stage_of(folder, threads=1, deterministic=False)
        for layer in range(spec.num_layers):
            spoil(stage, layer, share, seed=layer)
        for layers in RANGES[:5]:
            engines = [StageEngine(stage, spec, layers)] * PROBES
            _row(out, f"all weights moved by {share:.0%}", engines, expected, layers)


def _row(out: Recorder, what: str, engines: list[StageEngine], expected: RecordedModel, layers: LayerRange) -> None:
    began = time.perf_counter()
    found = [probe(engine, expected, seed) for seed, engine in enumerate(engines)]
    errors = sorted(judgement.error for judgement in found)
    out.row(
        stage=what,
        layers=str(layers),
        probes=len(found),
        passed=sum(judgement.passed for judgement in found),
        error_least=errors[0],
        error_median=errors[len(errors) // 2],
        error_most=errors[-1],
        probe_ms=(time.perf_counter() - began) * 1e3 / len(found),
    )
