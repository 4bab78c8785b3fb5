"""A disk that takes its time: what this node writes down must not stand in the way of its heartbeats."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from meshd.node import route_memory
from meshd.node.route_memory import EVERY_S, remember_routes
from meshd.routing.bandit import BanditPlanner


def test_statistics_are_written_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bool] = []

    def write(_path: Path, _data: bytes) -> None:
        written.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(route_memory, "write_whole", write)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(remember_routes, BanditPlanner(), tmp_path)
            await trio.sleep(EVERY_S * 2 + 1)
            while len(written) < 2:
                await trio.sleep(1)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
    assert written[:2] == [False, False]
    assert written[-1] is True, "at the end nobody waits for anything else"
