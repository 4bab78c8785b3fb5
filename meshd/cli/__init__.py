"""The command line. ``meshd start`` takes a short way to the daemon; everything else is typer's.

Exit status: 0 done, 1 could not be done, 2 wrong usage; a few commands add their own (see their help). Errors are one line on
stderr, never a traceback (``MESHD_TRACEBACK=1`` shows it to whoever hunts a bug).
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from meshd.cli.failure import of_ours, of_system, tell, with_its_flag

_TRACEBACK = "MESHD_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script: runs a command and exits."""
    _make_outputs()
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Run a command; its exit status."""
    from meshd.errors import MeshdError, Unauthorized, UsageError

    try:
        return _command(argv)
    except MeshdError as error:
        if os.environ.get(_TRACEBACK):
            raise
        of_the_key = getattr(error, "http_status", 0) == Unauthorized.status  # a node tells how HTTP clients send it
        tell(with_its_flag(error.message, error.param) + (", for MESHD_API_KEY" if of_the_key else ""))
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough (`meshd peers | head`).
        _forget_output()
        return 0
    except OSError as error:
        if os.environ.get(_TRACEBACK):
            raise
        tell(of_system(error))
        _forget_output()
        return 1
    except (Exception, BaseExceptionGroup) as error:  # a fault of ours is told in one line too
        if os.environ.get(_TRACEBACK):
            raise
        tell(f"internal error: {of_ours(error)}; {_TRACEBACK}=1 shows where it comes from")
        return 1


def _make_outputs() -> None:
    """Somewhere to write where the caller closed it, and no error for what the terminal's encoding has no sign for."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _command(argv: list[str]) -> int:
    if argv[:1] == ["start"]:
        # The daemon must not carry typer and rich (tests/test_imports.py), so this branch comes before them.
        from meshd.daemon import start

        return start(argv[1:])
    from meshd.cli.app import run_app

    status = run_app(argv)
    sys.stdout.flush()  # what cannot be written is found out here, not when the interpreter ends
    return status


def _output_is_lost() -> bool:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def _forget_output() -> None:
    """What is still in the buffer would fail again when the interpreter ends, with words of its own."""
    if _output_is_lost():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
