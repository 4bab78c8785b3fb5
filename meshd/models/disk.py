"""What a disk's refusals mean to us, and how bytes are made to survive a power cut.

An OSError that nobody expects ends the whole node, and memory cards fail every day: whoever touches the store's disk turns
them into errors of ours here, and only the load or the fetch that met them fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from meshd.errors import StateError, StoreFull


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn a full disk into StoreFull and any other refusal of the disk into StateError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"the disk of {root} is full: 'meshd rm NAME' frees room") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StateError(f"the model store {root} cannot be written: {error}") from error
        where = error.filename if isinstance(error.filename, str | Path) else root
        raise StateError(
            f"{where} cannot be used ({error.strerror or error}): if its disk is failing, keep the models on another one"
            " (MESHD_STATE_DIR)"
        ) from error


def flush(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk. A file is flushed before its rename and the folder after it:
    else a power cut leaves an empty file under the new name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
