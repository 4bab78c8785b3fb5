"""The command line. ``meshd start`` takes a short way to the daemon; everything else is typer's.

Exit status: 0 done, 1 could not be done, 2 wrong usage; a few commands add their own (see their help). Errors are one line on
stderr, never a traceback (``MESHD_TRACEBACK=1`` shows it to whoever hunts a bug).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script: runs a command and exits."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Run a command; its exit status."""
    from meshd.errors import MeshdError, UsageError

    try:
        if argv[:1] == ["start"]:
            # The daemon must not carry typer and rich (tests/test_imports.py), so this branch comes before them.
            from meshd.daemon import start

            return start(argv[1:])
        from meshd.cli.app import run_app

        return run_app(argv)
    except MeshdError as error:
        if os.environ.get("MESHD_TRACEBACK"):
            raise
        print(f"meshd: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough (`meshd peers | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
