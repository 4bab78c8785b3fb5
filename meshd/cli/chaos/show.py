"""Chaos to watch: who is struck, what the clients get, and the verdict. Owns the picture only."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshd.cli.chaos import verdict
from meshd.cli.chaos.experiment import Report
from meshd.cli.chaos.schedule import Strike
from meshd.cli.chaos.verdict import Asked
from meshd.vocabulary import LayerRange

_LINES = 8
_WINDOW_S = 5.0


class Show:
    """A live picture; where there is no terminal, a line for each strike."""

    def __init__(self, console: Console, places: Mapping[str, LayerRange | None]) -> None:
        self._console = console
        self._places = places
        self._lock = threading.Lock()
        self._struck: dict[str, str] = {}
        self._said: deque[str] = deque(maxlen=_LINES)
        self._tally: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()
        self._phase = ""
        self._began = time.monotonic()
        self._live = Live(self._picture(), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Show:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def heard(self, kind: str, what: Any) -> None:
        """`Experiment`'s listener; called from several threads."""
        with self._lock:
            match what:
                case Strike():
                    self._strike(kind, what)
                case Asked():
                    self._asked(what)
                case _:
                    self._phase = str(what)
                    self._say(f"-- {what}")
            if self._live.is_started:
                self._live.update(self._picture(), refresh=True)

    def _strike(self, kind: str, one: Strike) -> None:
        for name in one.nodes:
            if kind == "strike":
                self._struck[name] = one.kind
            else:
                self._struck.pop(name, None)
        if kind != "skip":
            done = one.kind if kind == "strike" else f"back from {one.kind}"
            self._say(f"{', '.join(one.nodes)}: {done}")

    def _asked(self, one: Asked) -> None:
        now = time.monotonic()
        self._tally["answers" if not one.code else one.code] += 1
        self._recent.append((now, len(one.tokens)))
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()

    def _say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:6.1f} s  {text}"
        self._said.append(line)
        if not self._live.is_started:
            self._console.print(line, highlight=False)

    def _picture(self) -> Group:
        nodes = Table(box=None, padding=(0, 2))
        for column in ("node", "layers", "struck by"):
            nodes.add_column(column)
        for name, layers in self._places.items():
            by = self._struck.get(name, "")
            nodes.add_row(name, str(layers or "entry"), Text(by or "·", style="red" if by else "green"))
        rate = sum(n for _, n in self._recent) / _WINDOW_S
        counts = ", ".join(f"{count} {name}" for name, count in self._tally.most_common())
        return Group(
            Text(self._phase, style="bold"), nodes, Text(f"{rate:.0f} tokens/s   {counts}"), Text("\n".join(self._said))
        )


def summary(report: Report) -> list[str]:
    """The verdict in a few lines."""
    figures = report.figures()
    lines = [f"{count:6d} {name}" for name, count in figures["outcomes"].items() if count]
    if report.hanging:
        lines.append(f"{report.hanging:6d} did not end")
    strikes = ", ".join(f"{count} {kind}" for kind, count in sorted(figures["strikes"].items()))
    lines.append(f"strikes: {strikes or 'none'}")
    for kind, lengths in sorted(verdict.by_kind(report.answers, report.done, report.outages).items()):
        ordered = sorted(lengths)
        lines.append(
            f"stalls by {kind or 'nothing known'}: {len(ordered)}, median {ordered[len(ordered) // 2] * 1e3:.0f} ms,"
            f" longest {ordered[-1] * 1e3:.0f} ms"
        )
    lines.append(
        f"tokens/s of all clients: {figures['tokens_per_s_before']:g} before, {figures['tokens_per_s_after']:g} after"
    )
    return lines
