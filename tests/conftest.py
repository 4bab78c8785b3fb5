"""What tests of several packages share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from meshd.cli.local_room import LocalRoom
from tests import rooms

ROOT = Path(__file__).parent.parent
ROOMS = frozenset({"daemon", "netns"})
PLACED = pytest.StashKey[bool]()


class Files(LoadScopeScheduling):  # type: ignore[misc]  # has no types
    """What `pytest -n` runs side by side: files; but rooms of daemons are one scope, because two rooms at once would take each
    other's processors and judge each other slow."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "rooms" if _has_rooms(file) else file


@cache
def _has_rooms(file: str) -> bool:
    text = (ROOT / file).read_text(encoding="utf-8")
    return any(f"pytest.mark.{name}" in text for name in ROOMS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, so that no worker is left alone at the end."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[bool, ...]:
    """Rooms of a test's own come before the shared ones, which stay once they are there."""
    long = _marked(item, {"torch"}) or "sim" in item.path.parts
    fixtures = getattr(item, "fixturenames", ())
    return not _marked(item, ROOMS), "_smollm2_room" in fixtures, "_four_halves" in fixtures, not long


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The process that was given the rooms has the processor before the others: daemons judge each other by time."""
    if "PYTEST_XDIST_WORKER" in os.environ and not item.config.stash.get(PLACED, False):
        item.config.stash[PLACED] = True
        os.nice(0 if _marked(item, ROOMS) else 10)


def _marked(item: pytest.Item, names: Set[str]) -> bool:
    return any(mark.name in names for mark in item.iter_markers())


@pytest.fixture(scope="session")
def smollm2_store() -> Path:
    """The store that SmolLM2-135M is in; skips where it is in none."""
    from meshd.config import default_state_dir
    from meshd.models.builtin import NAME
    from meshd.models.store import ModelStore

    state = Path(os.environ.get("MESHD_STATE_DIR") or default_state_dir())
    if ModelStore.under(state).find(NAME) is None:
        pytest.skip(f"{NAME} is not in {state}: meshd pull {NAME}")
    return state / "models"


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """The folder of SmolLM2-135M: MESHD_TEST_MODEL, else the store's."""
    given = os.environ.get("MESHD_TEST_MODEL")
    if given:
        return Path(given)
    store: Path = request.getfixturevalue("smollm2_store")
    from meshd.models.builtin import NAME
    from meshd.models.store import ModelStore

    model = ModelStore(store).find(NAME)
    assert model is not None
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


@pytest.fixture(scope="session")
def _smollm2_room(smollm2_store: Path) -> Iterator[LocalRoom]:
    with LocalRoom("smollm2-135m", store=smollm2_store, common=["--threads", "1"]) as room:
        rooms.halves_and_whole(room)
        yield room


@pytest.fixture
def smollm2_room(_smollm2_room: LocalRoom) -> LocalRoom:
    """SmolLM2-135M: n1 holds 0..15, n2 15..30, n3 all of it. All of them well."""
    rooms.whole(_smollm2_room, replicas=2)
    return _smollm2_room
