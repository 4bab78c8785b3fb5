"""What ``meshd elect`` and ``meshd plan`` make of figures that nobody can have measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshd.cli import qspec, run
from meshd.cli.plan import devices_of
from meshd.election.capacity import lane_budget, weight_budget
from meshd.election.settings import Settings
from meshd.models.pull import Source
from tests.doctor.documents import peer
from tests.models.checkpoints import write_model


@pytest.mark.parametrize("capacity_mb", [1e308, 10**400, float("inf"), float("nan"), -1.0])
def test_a_claim_beyond_any_device_counts_as_none(capacity_mb: float) -> None:
    """It comes from other devices: it must stop no election."""
    claimed = devices_of([peer("n1", None, capacity_mb=capacity_mb)], "d1")[0].capacity_mb
    assert (weight_budget(claimed, Settings()), lane_budget(claimed, Settings())) == (0, 0)


def test_a_plan_without_a_node_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "hash:30", "--nodes", "1600,1600,3100", "--without", "3"]
    assert run(words) == 0
    assert capsys.readouterr().out.startswith("without node 3, and before anybody has moved:\n")
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["without"] == 3


def test_what_is_missing_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "hash:30", "--nodes", "10"]) == 1
    said = capsys.readouterr()
    assert said.err == "meshd: hash:30: layers 0..30 are missing: 3000 MB short\n"
    assert "missing" not in said.out


def test_a_dtype_of_a_model_that_is_not_there_is_no_other_model_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "tiny")
    monkeypatch.setenv("MESHD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(qspec, "can_record", lambda: False)
    monkeypatch.setattr("meshd.models.pull.recognise", lambda name: Source("folder", name, str(folder)))
    assert run(["plan", "tiny@int8", "--nodes", "2400", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "tiny@int8"
