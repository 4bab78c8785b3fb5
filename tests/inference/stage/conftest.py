"""Tiny checkpoints, written once per session and never changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before torch: spinning threads starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
torch = pytest.importorskip("torch", reason="needs the engine extra")

Made = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``tiny(name, dtype)`` -> (folder, whole model) of one of `checkpoints`."""
    from tests.inference.stage.checkpoints import reference

    torch.set_num_threads(1)
    made: dict[tuple[str, Any], tuple[Path, Any]] = {}

    def make(name: str, dtype: Any = torch.float32) -> tuple[Path, Any]:
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name, dtype] = (folder, reference(name, folder, dtype))
        return made[name, dtype]

    return make
