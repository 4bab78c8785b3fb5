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
            # In a thread: a busy memory card syncs for seconds, and the room suspects a node that stands still so long.
            await trio.to_thread.run_sync(_save, path, _text(planner))
    finally:
        _save(path, _text(planner))


def _text(planner: BanditPlanner) -> bytes:
    return json.dumps(planner.dump(trio.current_time())).encode()


def _save(path: Path, text: bytes) -> None:
    with contextlib.suppress(OSError):
        write_whole(path, text)
