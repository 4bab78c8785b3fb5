"""Takes up a changed mesh key while the daemon runs, so that a rotation costs no link and no request.

`meshd key add | use | drop` rewrite the file; every two seconds its stamp is looked at. A file that is damaged or gone is
said once and changes nothing: a running room is worth more than a half-written file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from meshd.errors import MeshdError
from meshd.eventlog import EventLog
from meshd.identity import mesh_key
from meshd.identity.mesh_key import KeyRing

LOOK_S: Final = 2.0


async def watch_key(path: Path, ring: KeyRing, use: Callable[[KeyRing], None], log: EventLog) -> None:
    """Call ``use`` with each new ring. Runs until cancelled."""
    seen = _stamp(path)
    while True:
        await trio.sleep(LOOK_S)
        now = _stamp(path)
        if now == seen:
            continue
        seen = now
        try:
            changed = mesh_key.load(path)
        except MeshdError as error:
            log.emit("key", level="warning", text=f"kept the keys in use: {error.message}")
            continue
        if changed != ring:
            ring = changed
            use(ring)
            log.emit("key", text=f"{ring.mesh_id()} sends, {len(ring.keys)} accepted")


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
