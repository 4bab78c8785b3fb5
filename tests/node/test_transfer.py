"""Neighbours of very different pace."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from meshd.links.wire import Message
from meshd.models.shard import IncomingShard, Wanted
from meshd.node import transfer as transfers
from meshd.node.share_wire import PIECE_BYTES, parts_untrusted, piece_message
from meshd.node.transfer import Source, Transfer
from meshd.vocabulary import NodeId

SIZE = 8 * PIECE_BYTES
FAST, SLOW = NodeId("f" * 32), NodeId("5" * 32)


class Neighbour:
    """Sends what is asked for, a piece every ``piece_s``."""

    def __init__(self, piece_s: float) -> None:
        self.piece_s = piece_s

    async def open(self, question: Message, *, bulk: bool) -> Neighbour:
        assert bulk
        self._pieces = [
            piece_message(index, at, bytes(min(PIECE_BYTES, SIZE - at)))
            for index, (_, offset) in enumerate(parts_untrusted(question))
            for at in range(offset, SIZE, PIECE_BYTES)
        ]
        return self

    async def end(self) -> None:
        pass

    async def receive(self) -> Message | None:
        await trio.sleep(self.piece_s)
        return self._pieces.pop(0) if self._pieces else None

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(("pace_s", "took_about_s"), [((0.01, 9.0), 10.0), ((2.0, 3.0), 24.0)])
def test_who_is_done_takes_over_from_who_is_slow(
    pace_s: tuple[float, float], took_about_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight pieces each. The slow one sends just often enough not to count as gone, and would take 72 s for its own."""
    monkeypatch.setattr(transfers, "BATCH_BYTES", SIZE)
    neighbours = {node: Neighbour(piece_s) for node, piece_s in zip((FAST, SLOW), pace_s, strict=True)}
    written: Counter[str] = Counter()

    def write(name: str, at: int, data: bytes) -> None:
        assert written[name] == at
        written[name] += len(data)

    async def get(node: NodeId) -> Any:
        return neighbours[node]

    async def main() -> float:
        shard = SimpleNamespace(write=write, manifest=SimpleNamespace(spec=SimpleNamespace(name="m")))
        wanted = [Wanted(name, SIZE, 0) for name in ("b", "a")]
        transfer = Transfer(
            cast("IncomingShard", shard),
            wanted,
            "d",
            cast("Any", SimpleNamespace(get=get)),
            progress=lambda _share: None,
            on_liar=lambda *_: pytest.fail("nobody lies"),
        )
        names = frozenset({"a", "b"})
        await transfer.run([Source(SLOW, frozenset({"a"})), Source(FAST, names)])
        return trio.current_time()

    clock = trio.testing.MockClock(autojump_threshold=0.01)
    began = clock.current_time()
    took_s = trio.run(main, clock=clock) - began
    assert written == {"a": SIZE, "b": SIZE}
    assert took_about_s - 5 < took_s < took_about_s + 5
