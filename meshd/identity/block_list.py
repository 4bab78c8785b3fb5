"""Node ids that are barred from links: a file with one id a line, for a lost device whose room keeps its mesh key.

Read again when the file changes, so that barring a node needs no restart. `BlockList.read` raises for a damaged file (call it
once at start); a question asked while the file is damaged is answered from the last good list, and the damage is logged once.
"""

from __future__ import annotations

import logging
from pathlib import Path

from meshd.errors import StateError
from meshd.vocabulary import NodeId, is_node_id

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20


class BlockList:
    """The file, cached by its modification time. No file: nobody is barred."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._barred: frozenset[NodeId] = frozenset()
        self._told = ""

    def __contains__(self, node_id: object) -> bool:
        return node_id in self.current()

    def current(self) -> frozenset[NodeId]:
        """The barred ids; of a file that cannot be read those of the last good one, with a word in the log. Looks at the disk."""
        try:
            return self.read()
        except StateError as error:
            if error.message != self._told:
                self._told = error.message
                _log.warning("%s; the last good list stays in force", error.message)
            return self._barred

    def read(self) -> frozenset[NodeId]:
        """The barred ids. Raises StateError naming the file, and the line that is not a node id."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                with self._path.open("rb") as file:
                    text = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
                self._barred, self._stamp = _parse(self._path, text), stamp
        except FileNotFoundError:
            self._barred, self._stamp = frozenset(), None
        except OSError as error:
            raise StateError(f"block list {self._path} cannot be read: {error.strerror or error}") from error
        return self._barred


def _parse(path: Path, text: str) -> frozenset[NodeId]:
    barred = set()
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip().lower()
        if word and not is_node_id(word):
            raise StateError(f"block list {path}, line {number}: {word[:64]!r} is not a node id")
        if word:
            barred.add(NodeId(word))
    return frozenset(barred)
