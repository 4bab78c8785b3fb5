"""The state folder: one daemon at a time, files that are whole or absent.

Owns the lock and the way files are written; not what is in them. Every failure is a StateError that names the folder and
``--state-dir``. The lock is the kernel's (flock): it goes with the process, however that ends, and a child started by exec
does not inherit it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from meshd.errors import StateError

LOCK_FILE = "lock"


@contextlib.contextmanager
def naming_the_folder(folder: Path) -> Iterator[None]:
    """Turn an OSError inside into a StateError that names the folder and the flag."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StateError(
            f"state folder {folder} cannot be used ({reason}); choose another with --state-dir", param="--state-dir"
        ) from error


class StateFolder:
    """The folder while this process holds its lock. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

    def __enter__(self) -> StateFolder:
        """Make the folder (0700) if need be and lock it, without waiting. Raises StateError."""
        with naming_the_folder(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._take(fd)
            except BaseException:
                os.close(fd)
                raise
        self._lock_fd = fd
        return self

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            raise StateError(
                f"state folder {self.path} is in use by another meshd (pid {holder or 'unknown'}); "
                "stop it or choose another folder with --state-dir",
                param="--state-dir",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write(self, name: str, data: bytes) -> None:
        """Replace a file of the folder. Raises StateError."""
        with naming_the_folder(self.path):
            write_whole(self.path / name, data)

    def read(self, name: str) -> bytes | None:
        """A file of the folder, None if there is none. Raises StateError."""
        with naming_the_folder(self.path):
            path = self.path / name
            return path.read_bytes() if path.exists() else None


def write_whole(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, readable by its owner only: after a crash or power cut it is the old or the new file.

    The file and then its folder are synced, so what this returns from is on the disk. Raises OSError.
    """
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600 by definition
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)
