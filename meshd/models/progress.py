"""How long work on a model tells how far it is: ``progress(stage, done_bytes, total_bytes)``; a total of 0 is not known."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
