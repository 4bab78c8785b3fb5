"""The program that a device runs to answer: `meshd.fleet.device`, sent as text in front of each request.

What is sent: a line with the program's length, the program, the request's JSON line, and the bytes it carries. The device's part
of the command line is the same for every question: find a Python that is new enough, let it read and run what comes.
"""

from __future__ import annotations

import json
import shlex
from importlib import resources
from typing import Any, Final

from meshd.fleet.device.main import MARK

# Each after what it imports.
_ORDER: Final = (*("shell", "places", "boot_files", "service", "environments", "facts", "preparing", "room", "main"),)
_PYTHONS: Final = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")
_READ: Final = "import sys; stdin = sys.stdin.buffer; exec(stdin.read(int(stdin.readline())))"
_NEW_ENOUGH: Final = "import sys; sys.exit(sys.version_info < (3, 11))"


def remote_command(python: str | None = None) -> str:
    """What ssh runs; ``python`` names an interpreter there, else the first of at least 3.11 is taken."""
    none = MARK + json.dumps({"trouble": "no Python 3.11 or newer here; install one, or name it with --python"})
    script = (
        f"for python in {' '.join([shlex.quote(python)] if python else _PYTHONS)}; do "
        f'if "$python" -c {shlex.quote(_NEW_ENOUGH)} 2>/dev/null; then exec "$python" -c {shlex.quote(_READ)}; fi; done; '
        f"echo {shlex.quote(none)}"
    )
    return f"exec sh -c {shlex.quote(script)}"  # whatever the login shell is


def message(request: dict[str, Any]) -> bytes:
    """Program and request, as they go to stdin."""
    program = _program().encode()
    return b"%d\n" % len(program) + program + json.dumps(request).encode() + b"\n"


def answer_in(output: str) -> dict[str, Any] | None:
    """The answer among what a login shell may have printed; None when there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith(MARK):
            document = json.loads(line.removeprefix(MARK))
            return document if isinstance(document, dict) else None
    return None


def _program() -> str:
    """The modules as one program: their packages exist in name only, so that the same imports work as here."""
    package = resources.files("meshd.fleet.device")
    sources = [(f"meshd.fleet.device.{name}", (package / f"{name}.py").read_text(encoding="utf-8")) for name in _ORDER]
    return f"""\
import sys, types
for name in ("meshd", "meshd.fleet", "meshd.fleet.device"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in {sources!r}:
    module = sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules["meshd.fleet.device"], name.rpartition(".")[2], module)
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules["meshd.fleet.device.main"].main()
"""
