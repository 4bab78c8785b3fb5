"""What happened to each device, and how it is shown: lines or a live table while it happens, a table or JSON at the end."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, TextIO

from meshd.fleet.hosts import Device


@dataclass(slots=True)
class Outcome:
    """One device. ``changes``: what was done, or with --dry-run would be; ``error``: why it failed."""

    device: Device
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    doing: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return {
            "host": str(self.device),
            "ok": not self.error,
            "error": self.error or None,
            "changes": self.changes,
            "warnings": self.warnings,
            **self.facts,
        }


class Progress:
    """Tells, from any thread, what each device is doing: a table that is redrawn on a terminal, else a line each time."""

    def __init__(self, outcomes: list[Outcome], stream: TextIO | None = None) -> None:
        self._outcomes = outcomes
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._drawn = 0
        self._lock = threading.Lock()

    def doing(self, outcome: Outcome, text: str) -> None:
        with self._lock:
            outcome.doing = text
            self._tell(outcome, text)

    def did(self, outcome: Outcome, text: str) -> None:
        with self._lock:
            outcome.changes.append(text)
            self._tell(outcome, text)

    def failed(self, outcome: Outcome, text: str) -> None:
        with self._lock:
            outcome.error = text
            self._tell(outcome, f"FAILED: {text}")

    def _tell(self, outcome: Outcome, text: str) -> None:
        if not self._live:
            self._stream.write(f"{outcome.device}: {text}\n")
            self._stream.flush()
            return
        width = shutil.get_terminal_size().columns - 1
        rows = [f"{device.device!s:24} {_state(device)}"[:width] for device in self._outcomes]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self._stream.write(up + "".join(f"\x1b[2K{row}\n" for row in rows))
        self._stream.flush()
        self._drawn = len(rows)


def _state(outcome: Outcome) -> str:
    return f"FAILED: {outcome.error}" if outcome.error else outcome.doing


def document(command: str, outcomes: list[Outcome], **more: Any) -> str:
    """The --json form."""
    ok = not any(outcome.error for outcome in outcomes)
    return json.dumps(
        {"command": command, "ok": ok, **more, "devices": [outcome.json() for outcome in outcomes]}, indent=2
    )


def table(outcomes: list[Outcome], *, dry_run: bool = False, stopped: bool = False) -> str:
    """For people: a line for each device, under it what was done and what is to be said. ``stopped``: not all was looked at, so
    that nothing was found to do says nothing."""
    lines = []
    for outcome in outcomes:
        facts = outcome.facts
        layers = (
            "..".join(map(str, facts["layers"])) if facts.get("layers") else "no layers" if "layers" in facts else ""
        )
        about = [str(facts.get(key) or "") for key in ("name", "state", "version", "service")]
        lines.append("  ".join(word for word in (f"{outcome.device!s:24}", *about, layers) if word))
        if outcome.error:
            lines.append(f"    FAILED: {outcome.error}")
        lines += [f"    {'would ' if dry_run else ''}{change}" for change in outcome.changes]
        lines += [f"    note: {warning}" for warning in outcome.warnings]
        if not outcome.error and not outcome.changes and dry_run and not stopped:
            lines.append("    nothing to do")
    return "\n".join(lines)
