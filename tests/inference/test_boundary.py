"""A boundary log is read whole however long it is: a message has a limit, a prompt has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio

from meshd.errors import NeedRows
from meshd.inference.engine import EngineInfo
from meshd.inference.worker_engine import WorkerEngine
from meshd.links.frame import MAX_BODY_BYTES
from meshd.links.wire import Message
from meshd.vocabulary import LayerRange, ModelSpec, SessionId

SPEC = ModelSpec("wide", "d", "bf16", 4, 4096, 9, (1,) * 4, 1, 1, True, 8, 64)
ROW_BYTES = SPEC.hidden_size * 2
FRONT = LayerRange(0, 2)


def engine_with(have: int, asked: list[tuple[int, int]], spec: ModelSpec = SPEC) -> WorkerEngine:
    """Over a worker that has ``have`` rows, each of its own number."""

    async def call(message: Message) -> Message:
        await trio.lowlevel.checkpoint()
        start, end = message.head["start"], message.head["end"]
        asked.append((start, end))
        if end > have:
            raise NeedRows(have)
        body = b"".join(row.to_bytes(4, "little") * (ROW_BYTES // 4) for row in range(start, end))
        assert len(body) <= MAX_BODY_BYTES, "the worker's link takes no such message"
        return Message("rows", body=body)

    engine: Any = WorkerEngine.__new__(WorkerEngine)
    vars(engine).update(_info=EngineInfo(spec, FRONT, "bf16", "x", True, 1), _call=call)
    return engine  # type: ignore[no-any-return]


def test_more_rows_than_a_message_holds_are_read() -> None:
    rows = MAX_BODY_BYTES // ROW_BYTES + 100
    asked: list[tuple[int, int]] = []
    read = trio.run(engine_with(rows, asked).boundary, SessionId("s"), FRONT, 7, rows)
    assert len(read) == (rows - 7) * ROW_BYTES
    assert [int.from_bytes(read[at : at + 4], "little") for at in range(0, len(read), ROW_BYTES)] == [*range(7, rows)]
    assert [start for start, _ in asked] == [7, *(end for _, end in asked[:-1])]


def test_few_rows_and_none_are_one_question() -> None:
    asked: list[tuple[int, int]] = []
    engine = engine_with(64, asked)
    assert len(trio.run(engine.boundary, SessionId("s"), FRONT, 0, 64)) == 64 * ROW_BYTES
    assert trio.run(engine.boundary, SessionId("s"), FRONT, 64, 64) == b""
    assert asked == [(0, 64), (64, 64)]


def test_a_log_that_ends_too_soon_says_where() -> None:
    with pytest.raises(NeedRows) as need:
        trio.run(engine_with(2000, []).boundary, SessionId("s"), FRONT, 0, 3000)
    assert need.value.have == 2000


def test_rows_that_are_wider_than_a_piece_come_one_by_one() -> None:
    asked: list[tuple[int, int]] = []
    trio.run(engine_with(3, asked, replace(SPEC, hidden_size=1 << 24)).boundary, SessionId("s"), FRONT, 0, 3)
    assert asked == [(0, 1), (1, 2), (2, 3)]
