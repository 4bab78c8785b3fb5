"""Progress bars on the terminal: how work on a model, which only reports bytes, is shown to who waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from meshd.cli.room import notes
from meshd.models.progress import Progress


@contextmanager
def bars() -> Iterator[Progress]:
    """A progress bar for each stage of work on a model; on stderr, so that ``--json`` stays one document. Nothing is written
    before there is progress: what is refused at once is told in one line."""
    columns = (TextColumn("{task.description:12s}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    shown = Bars(*columns, console=notes)
    tasks: dict[str, TaskID] = {}

    def progress(stage: str, done_bytes: int, total_bytes: int) -> None:
        if not tasks:
            shown.start()
        if stage not in tasks:
            tasks[stage] = shown.add_task(stage, total=total_bytes or None)
        shown.update(tasks[stage], completed=done_bytes, total=total_bytes or None)

    try:
        yield progress
    finally:
        if tasks:
            shown.stop()
