"""The event log where its output takes nothing for a while: the node goes on, and so does the log afterwards."""

from __future__ import annotations

import errno
import io
import json
import os

import pytest

from meshd.eventlog import EventLog
from tests.election.specs import node


class Disk(io.StringIO):
    """A file on a disk that refuses everything with ``refusal``."""

    refusal = 0

    def flush(self) -> None:
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))


@pytest.mark.parametrize(("refusal", "later"), [(errno.ENOSPC, True), (errno.EPIPE, False)])
def test_a_full_disk_is_written_to_again_and_a_reader_that_left_is_not(refusal: int, later: bool) -> None:
    disk = Disk()
    log = EventLog(node(1), "n1", out=disk)
    disk.refusal = refusal
    log.emit("admit", text="during")
    disk.refusal = 0
    log.emit("admit", text="after")
    assert ("after" in disk.getvalue(), "lost n1 1 lines" in disk.getvalue()) == (later, later)


def test_a_pipe_that_nobody_reads_stops_nobody() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # so that a write that would wait fails, and this test with it
    with os.fdopen(writing, "w") as out, os.fdopen(reading) as reader:
        log = EventLog(node(1), "n1", form="json", out=out)
        for number in range(2000):
            log.emit("answer", number=number, text="x" * 100)
        os.set_blocking(reading, False)
        before = [json.loads(line) for line in reader.read().splitlines()]
        log.emit("answer", number=2000)
        lost, last = (json.loads(line) for line in reader.read().splitlines())
    assert [event["number"] for event in before] == list(range(len(before)))
    assert (lost["ev"], lost["node"], lost["level"]) == ("lost", node(1), "warning")
    assert lost["text"].startswith(f"{2000 - len(before)} lines")
    assert last["number"] == 2000


def test_a_node_calls_itself_what_the_room_calls_it() -> None:
    out = io.StringIO()
    log = EventLog(node(1), "n1", out=out)
    log.emit("listening")
    log.label = lambda: "n1~0000"
    log.emit("ready")
    log.emit("join", node=node(2))
    assert out.getvalue().splitlines() == ["listening n1", "ready n1~0000", "join 00000000"]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_character_that_the_output_has_not_costs_itself_and_not_the_log(encoding: str) -> None:
    """A terminal of another encoding; half a surrogate pair, as the path of a file that is not UTF-8 holds it."""
    raw = io.BytesIO()
    log = EventLog(node(1), "n1", out=io.TextIOWrapper(raw, encoding=encoding))
    log.emit("store", text="/models/\udce9t\u00e9 is damaged")
    log.emit("ready")
    first, second = raw.getvalue().decode(encoding).splitlines()
    assert first.startswith("store n1 /models/\\udce9t")
    assert second == "ready n1"
