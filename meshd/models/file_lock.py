"""An advisory lock on a file, between processes and threads of one device.

Owns nothing but the descriptor: the kernel frees the lock when its holder dies, so there are no stale locks. Errors:
StateError when it is not had in time or its file cannot be made.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from meshd.errors import StateError
from meshd.models.disk import disk_errors

_RETRY_S: Final = 0.1


class FileLock:
    """A lock named by a path. The file stays; only its lock matters."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def held(self, timeout_s: float, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock; ``waiting`` is told once if somebody else has it. StateError after ``timeout_s``."""
        with disk_errors(self.path.parent):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + timeout_s
            told = False
            while not _try(descriptor):
                if not told and waiting is not None:
                    waiting()
                told = True
                if time.monotonic() >= deadline:
                    raise StateError(f"{self.path} is held by another process, and was for {timeout_s:g} s")
                time.sleep(_RETRY_S)
            yield
        finally:
            os.close(descriptor)  # frees the lock with it


if sys.platform == "win32":
    import msvcrt

    def _try(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
