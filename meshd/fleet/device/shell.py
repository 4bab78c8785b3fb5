"""Running programs on the device, and as whom.

Never asks for a password: root, `sudo -n`, or the login user alone. Everything has a time limit. Raises Trouble, whose message
is shown to the administrator as it is.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class Trouble(Exception):
    """Something could not be done on this device; the message names it and, where there is one, the cure."""


@dataclass(frozen=True, slots=True)
class Done:
    """A program that ended. ``text``: stdout and stderr together."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.code}"


def run(argv: Sequence[str | Path], *, timeout_s: float = 60.0, text: str = "", privileged: bool = False) -> Done:
    """Run to the end. A program that is missing or takes too long is a Done with status 127 or 124."""
    words = [str(word) for word in argv]
    if privileged and privilege() == "sudo":
        words = ["sudo", "-n", *words]
    # XDG_RUNTIME_DIR: `systemctl --user` over SSH finds its bus there, and not every sshd sets it.
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ, "LC_ALL": "C"}
    try:
        ended = subprocess.run(  # noqa: S603 - the words are ours, no shell reads them
            words,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except FileNotFoundError:
        return Done(127, f"{words[0]}: not found")
    except subprocess.TimeoutExpired:
        return Done(124, f"{words[0]}: no end within {timeout_s:g} s")
    return Done(ended.returncode, ended.stdout)


def must(argv: Sequence[str | Path], what: str, *, timeout_s: float = 60.0, privileged: bool = False) -> str:
    """Run; its output. Raises Trouble naming ``what`` and the last line it said."""
    done = run(argv, timeout_s=timeout_s, privileged=privileged)
    if done.code:
        raise Trouble(f"{what}: {done.last_line}")
    return done.text


@functools.cache
def privilege() -> str:
    """``root``, ``sudo`` (without a password) or ``user``."""
    if os.geteuid() == 0:
        return "root"
    return "sudo" if shutil.which("sudo") and run(["sudo", "-n", "true"], timeout_s=10).code == 0 else "user"
