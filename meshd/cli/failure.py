"""What went wrong, in a line on stderr."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path

_WRITING = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


def tell(message: str) -> None:
    """One line, whatever others put into the message: a room's error may hold line ends and a terminal's commands."""
    line = "; ".join(part.strip() for part in message.splitlines() if part.strip())
    print(f"meshd: {''.join(char if char.isprintable() else '?' for char in line)}", file=sys.stderr)


def with_its_flag(message: str, param: str | None) -> str:
    """The flag to change stands in every message about it."""
    return f"{param}: {message}" if param and param.startswith("--") and param not in message else message


def of_system(error: OSError) -> str:
    """What the system said, and of which file."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}"
    return f"the output cannot be written: {reason}" if error.errno in _WRITING else reason


def of_ours(error: BaseException) -> str:
    """Kind, words and place of what nobody expected; of a group its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    places = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    return f"{type(error).__name__}: {str(error)[:200]}{where}"
