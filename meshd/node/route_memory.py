"""Route statistics over a restart: read at the start (all of it stale then), written each minute and at the end."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Final

import trio

from meshd.identity.state_folder import write_whole
from meshd.routing.bandit import BanditPlanner

FILE: Final = "routes.json"
EVERY_S: Final = 60.0
MAX_BYTES: Final = 1 << 20


async def remember_routes(planner: BanditPlanner, state: Path) -> None:
    """Run until cancelled. A damaged or missing file is an empty one; a disk that refuses loses statistics, nothing else."""
    path = state / FILE
    with contextlib.suppress(OSError, ValueError):
        if path.stat().st_size <= MAX_BYTES:
            planner.load(json.loads(path.read_bytes()), trio.current_time())
    try:
        while True:
            await trio.sleep(EVERY_S)
            _save(planner, path)
    finally:
        _save(planner, path)


def _save(planner: BanditPlanner, path: Path) -> None:
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(planner.dump(trio.current_time())).encode())
