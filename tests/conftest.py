"""What tests of several packages share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshd.cli.local_room import LocalRoom
from tests import rooms


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


@pytest.fixture(scope="session")
def _four_halves() -> Iterator[LocalRoom]:
    with LocalRoom(rooms.MODEL) as room:
        rooms.four_halves(room)
        yield room


@pytest.fixture
def four_halves(_four_halves: LocalRoom) -> LocalRoom:
    """The shared room: n1, n3 hold 0..15, n2, n4 15..30, e0 none. All of them well, whatever a test did to them before."""
    rooms.whole(_four_halves, replicas=2)
    return _four_halves
