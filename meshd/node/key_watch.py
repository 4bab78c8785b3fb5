"""Takes up a changed mesh key while the daemon runs, so that a rotation costs no link and no request.

`meshd key add | use | drop` rewrite the file; every two seconds its stamp is looked at. A file that is damaged or gone, or a
key that cannot be used now, is said once and changes nothing, and is tried again at each look: a running room is worth more
than a half-written file.
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
    """Call ``use``, which may raise a MeshdError and then has changed nothing, with each new ring. Runs until cancelled."""
    seen: tuple[int, int] | None = (0, 0)  # no file's: it may have changed since ``ring`` was read
    said = ""
    while True:
        await trio.sleep(LOOK_S)
        now = _stamp(path)
        if now == seen:
            continue
        try:
            changed = mesh_key.load(path)
            if changed != ring:
                use(changed)
                ring = changed
                log.emit("key", text=f"{ring.mesh_id()} sends, {len(ring.keys)} accepted")
        except MeshdError as error:
            if error.message != said:
                log.emit("key", level="warning", text=f"kept the keys in use for now: {error.message}")
            said = error.message
        else:
            seen, said = now, ""


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
