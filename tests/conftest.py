"""What tests of several packages share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M: MESHD_TEST_MODEL, else the store's; skips where it is in neither."""
    given = os.environ.get("MESHD_TEST_MODEL")
    if given:
        return Path(given)
    from meshd.config import default_state_dir
    from meshd.models.store import ModelStore

    model = ModelStore.under(default_state_dir()).find("SmolLM2-135M")
    if model is None:
        pytest.skip(f"SmolLM2-135M is not in {default_state_dir()}: pull it, or set MESHD_TEST_MODEL to its folder")
    return model.path
