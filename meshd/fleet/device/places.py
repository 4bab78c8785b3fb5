"""Where everything is on this device, and how a file gets there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from meshd.fleet.device.shell import Trouble


def home() -> Path:
    """What mass-equip installs; nothing of it is needed to keep the node's identity."""
    return Path.home() / ".meshd"


def state() -> Path:
    """The state folder of `meshd start`: the same place that it finds by itself (platformdirs' user_data_dir)."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Application Support/meshd"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "meshd"


def environment() -> Path:
    """The Python environment in use: a link into `environments`, so that a switch is one rename."""
    return home() / "env"


def environments() -> Path:
    """Every environment that was built and may be switched to."""
    return home() / "envs"


def meshd() -> Path:
    """The installed program."""
    return environment() / "bin/meshd"


def undo() -> Path:
    """One script for each preparation, written before the preparation is done."""
    return home() / "undo"


def untold() -> Path:
    """There while something was changed that the daemon learns at its next start only, whoever was to restart it."""
    return home() / "untold"


def log() -> Path:
    """What the daemon says where no systemd keeps it."""
    return home() / "log"


def is_termux() -> bool:
    """An Android phone."""
    return "com.termux" in os.environ.get("PREFIX", "")


def write_whole(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file, whole or not at all; its folder is made (0700). Raises Trouble."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # noqa: PTH101 - a path from mkstemp
        os.replace(temporary, path)  # noqa: PTH105 - a path from mkstemp
    except OSError as error:
        raise Trouble(f"{path} cannot be written: {error.strerror or error}") from error


def read(path: Path) -> str:
    """A file's text, "" when there is none."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
