"""``--json`` is one document on stdout, whatever else there is to tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshd.cli import qspec, run
from tests.models.checkpoints import write_model


def test_a_pull_shows_its_progress_beside_its_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qspec, "can_record", lambda: False)
    folder, state = write_model(tmp_path / "tiny"), str(tmp_path / "state")
    assert run(["pull", str(folder), "--state-dir", state, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["name"] == "tiny"
    assert "hash" in shown.err
    assert run(["models", "--state-dir", state, "--json"]) == 0
    assert [model["name"] for model in json.loads(capsys.readouterr().out)] == ["tiny"]
