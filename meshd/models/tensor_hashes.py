"""SHA-256 of tensors in files, remembered as long as the file is the same one.

Owns the cache file. A file is known by device, inode, size and modification time in nanoseconds; stored models are
never rewritten in place, so an unchanged identity means unchanged bytes. Hashing blocks (about 1 GB/s): call it in a thread.
A cache that cannot be read or written costs time and nothing else. Errors: OSError from reading the model's own file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from io import RawIOBase
from pathlib import Path
from typing import Final

from meshd.models.headers import TensorInfo

_CHUNK_BYTES: Final = 1 << 20
_FILES_CAP: Final = 512


class TensorHashes:
    """Hashes of tensors under one root, cached in ``cache_file``."""

    def __init__(self, cache_file: Path) -> None:
        self._cache_file = cache_file
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, str]] | None = None

    def of(
        self, folder: Path, tensors: Iterable[TensorInfo], read_bytes: Callable[[int], None] | None = None
    ) -> dict[str, str]:
        """``name -> sha256`` of ``tensors``. ``read_bytes`` hears the size of each tensor when it is done."""
        by_file: dict[str, list[TensorInfo]] = {}
        for tensor in tensors:
            by_file.setdefault(tensor.file, []).append(tensor)
        found: dict[str, str] = {}
        for name, wanted in sorted(by_file.items()):
            with (folder / name).open("rb", buffering=0) as file:
                identity = _identity(file.fileno())
                hashes = self._lookup(identity)
                news: dict[str, str] = {}
                for tensor in sorted(wanted, key=lambda item: item.start):
                    key = f"{tensor.start}:{tensor.end}"
                    value = hashes.get(key)
                    if value is None:
                        value = news[key] = _hash(file, tensor.start, tensor.end)
                    found[tensor.name] = value
                    if read_bytes is not None:
                        read_bytes(tensor.size_bytes)
                if news and _identity(file.fileno()) == identity:
                    self._remember(identity, news)
        return found

    def _lookup(self, identity: str) -> dict[str, str]:
        with self._lock:
            return dict(self._load().get(identity, {}))

    def _remember(self, identity: str, news: dict[str, str]) -> None:
        with self._lock:
            self._known = None  # another process may have written since
            known = self._load()
            known[identity] = {**known.pop(identity, {}), **news}  # moved to the end: the newest are kept
            while len(known) > _FILES_CAP:
                del known[next(iter(known))]
            with contextlib.suppress(OSError):
                draft = self._cache_file.with_name(f"{self._cache_file.name}.{os.getpid()}.{threading.get_ident()}")
                draft.write_bytes(json.dumps(known).encode())
                draft.replace(self._cache_file)

    def _load(self) -> dict[str, dict[str, str]]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                document = json.loads(self._cache_file.read_bytes())
                if isinstance(document, dict) and all(isinstance(item, dict) for item in document.values()):
                    self._known = document
        return self._known


def _identity(descriptor: int) -> str:
    status = os.fstat(descriptor)
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _hash(file: RawIOBase, start: int, end: int) -> str:
    total = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    file.seek(start)
    position = start
    while position < end:
        got = file.readinto(buffer[: end - position])
        if not got:
            raise OSError(f"the file ends at byte {position}, a tensor at {end}")
        total.update(buffer[:got])
        position += got
    return total.hexdigest()
