"""Fetching a model where no process can be started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from meshd.errors import LocalError
from meshd.node import model


def test_a_process_that_cannot_be_started_is_no_end_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LocalError, match="meshd pull m cannot be started: No such file"):
        trio.run(model.fetch, "m", tmp_path, lambda _line: None)


def test_what_is_fetched_for_a_dtype_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f'#!/bin/sh\necho "$4" > {told}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    trio.run(model.fetch, "m@int8", tmp_path, lambda _line: None)
    assert told.read_text() == "m\n"
