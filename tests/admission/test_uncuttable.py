"""Layers whose state cannot be cut back (short convolutions, linear attention) are proven like any others."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the engine extra")

from meshd.inference.worker.stage import Stage  # noqa: E402  # after the check for the extra
from meshd.models.pull import pull  # noqa: E402
from meshd.models.store import ModelStore  # noqa: E402
from meshd.vocabulary import LayerRange  # noqa: E402
from tests.admission.smollm2_probe import expectation, probe  # noqa: E402
from tests.admission.stage_engine import StageEngine  # noqa: E402
from tests.inference.stage.checkpoints import LAYERS, reference  # noqa: E402

pytestmark = pytest.mark.torch

TAIL = LayerRange(1, LAYERS)


def test_the_models_end_passes_and_a_broken_one_does_not(tmp_path: Path) -> None:
    """The greedy ids are drawn at positions that such a state has already passed."""
    reference("lfm2", tmp_path / "tiny", torch.bfloat16)
    model = pull(str(tmp_path / "tiny"), ModelStore.under(tmp_path))
    expected, spec = expectation(model.path, tmp_path)
    stage = Stage(model.path, TAIL)
    honest = probe(StageEngine(stage, spec, TAIL), expected, seed=1)
    assert honest.passed, honest.reason
    assert not probe(StageEngine(stage, spec, TAIL, fault="skip", at=2), expected, seed=1).passed
