"""The daemon tidies its store before it does anything else, and serves also where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from meshd.daemon import Daemon
from meshd.errors import StateError
from meshd.models.store import ModelStore


class _Started(Exception):
    """As far as these tests go."""


def start(store: Any) -> list[str]:
    """Begin to run a daemon with ``store``; what it logged until its links were started."""
    said: list[str] = []

    async def links(*_args: object, **_more: object) -> None:
        raise _Started

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            daemon: Any = Daemon.__new__(Daemon)
            daemon.store, daemon.nursery = store, nursery
            daemon.links, daemon.sockets = SimpleNamespace(run=links), SimpleNamespace(links=None)
            daemon.log = SimpleNamespace(emit=lambda _name, *, level, text: said.append(f"{level} {text}"))
            await daemon.run(None)

    with pytest.raises(BaseExceptionGroup) as ended:
        trio.run(run)
    assert ended.group_contains(_Started)
    return said


def test_what_crashed_pulls_left_is_gone_when_a_daemon_has_started(tmp_path: Path) -> None:
    store = ModelStore.under(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait(timeout=60)
    left = store.root / f"new-{gone.pid}-x"
    left.mkdir(parents=True)
    assert start(store) == []
    assert not left.exists()


def test_a_store_that_cannot_be_tidied_stops_no_daemon() -> None:
    def sweep() -> None:
        raise StateError("the card is read-only")

    assert start(SimpleNamespace(sweep=sweep)) == ["warning left as it is: the card is read-only"]
