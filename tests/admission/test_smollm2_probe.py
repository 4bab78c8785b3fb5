"""Probes of SmolLM2-135M: honest stages pass whatever their arithmetic, broken ones never do.

A sample: ``python -m benchmarks admission`` tries every layer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the engine extra")

from meshd.admission.expected import RecordedModel  # noqa: E402  # after the check for the extra
from meshd.inference.worker.stage import Stage  # noqa: E402
from meshd.vocabulary import LayerRange, ModelSpec  # noqa: E402
from tests.admission.smollm2_probe import expectation, probe  # noqa: E402
from tests.admission.stage_engine import StageEngine, spoil, stage_of  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.model]

BACK, MIDDLE = LayerRange(24, 30), LayerRange(7, 13)


@pytest.fixture(scope="module")
def expected(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedModel, ModelSpec]:
    return expectation(smollm2, tmp_path_factory.mktemp("qspec"))


@pytest.fixture(scope="module")
def stages(smollm2: Path) -> dict[LayerRange, Stage]:
    return {layers: stage_of(smollm2, threads=1, layers=layers) for layers in (MIDDLE, BACK)}


@pytest.mark.parametrize("layers", [MIDDLE, BACK])
def test_bf16_passes(
    stages: dict[LayerRange, Stage], expected: tuple[RecordedModel, ModelSpec], layers: LayerRange
) -> None:
    judgement = probe(StageEngine(stages[layers], expected[1], layers), expected[0], seed=3)
    assert judgement.passed, judgement.reason
    assert judgement.error < 0.02, "the gate is at 4 %, honest stages well below"


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "fp32", "deterministic": False},
        {"dtype": "int8"},
        {"prepack": "on"},
        {"threads": 2, "deterministic": False},
    ],
    ids=["fp32", "int8", "prepacked", "two-threads"],
)
def test_other_honest_arithmetic_passes(
    smollm2: Path, expected: tuple[RecordedModel, ModelSpec], how: dict[str, object]
) -> None:
    stage = stage_of(smollm2, layers=BACK, **{"threads": 1, **how})  # type: ignore[arg-type]  # a mixed dict
    judgement = probe(StageEngine(stage, expected[1], BACK), expected[0], seed=4)
    assert judgement.passed, judgement.reason


@pytest.mark.parametrize(
    ("fault", "layers", "at"),
    [
        ("skip", MIDDLE, 7),
        ("skip", MIDDLE, 10),
        ("skip", BACK, 29),
        ("double", MIDDLE, 9),
        ("double", BACK, 25),
        ("swap", MIDDLE, 8),
        ("swap", BACK, 25),
        ("shift", MIDDLE, 7),
        ("stale", MIDDLE, 7),
        ("stale", BACK, 24),
    ],
)
def test_a_broken_stage_is_refused(
    stages: dict[LayerRange, Stage],
    expected: tuple[RecordedModel, ModelSpec],
    fault: str,
    layers: LayerRange,
    at: int,
) -> None:
    judgement = probe(StageEngine(stages[layers], expected[1], layers, fault=fault, at=at), expected[0], seed=at)
    assert not judgement.passed
    assert judgement.error > 0.05


def test_another_revisions_weights_are_refused(smollm2: Path, expected: tuple[RecordedModel, ModelSpec]) -> None:
    stage = stage_of(smollm2, threads=1, layers=MIDDLE, deterministic=False)
    for layer in range(MIDDLE.start, MIDDLE.end):
        spoil(stage, layer, 0.06, seed=layer)
    assert not probe(StageEngine(stage, expected[1], MIDDLE), expected[0], seed=5).passed
