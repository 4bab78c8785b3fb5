"""A long prompt fills the stages like a pipeline: each computes a chunk while the one before computes the next."""

from __future__ import annotations

import pytest
import trio

from meshd.chain.attempts import CHUNK_ROWS
from meshd.chain.request import GenerationRequest
from meshd.inference.engine import Ran, Run
from meshd.inference.hash_engine import HashEngine
from meshd.inference.hash_stage import reference
from tests.chain.room import LAYERS, open_room, run, three_stages

STEP_MS = 12.0  # of the whole model: a third of it takes 4 ms, whatever the rows
STAGE_S = 0.004
CHUNKS = 8
PROMPT = tuple(i % 251 for i in range(CHUNKS * CHUNK_ROWS))


def test_stages_compute_different_chunks_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[tuple[int, int], tuple[float, float]] = {}  # (stage, chunk) -> begin, end
    compute = HashEngine.run

    async def recorded(engine: HashEngine, asked: Run) -> Ran:
        began = trio.current_time()
        ran = await compute(engine, asked)
        if asked.start < len(PROMPT):
            times[asked.layers.start // 4, asked.start // CHUNK_ROWS] = began, trio.current_time()
        return ran

    monkeypatch.setattr(HashEngine, "run", recorded)

    async def main() -> None:
        async with open_room() as room:
            await three_stages(room, step_ms=STEP_MS)
            began = trio.current_time()
            out = await room.ask(9, GenerationRequest(PROMPT, 1))
            assert out.tokens == reference(PROMPT, 1, LAYERS)
            wires = 12 * room.net.latency_s  # links are dialled on the way
            assert out.times[0] - began <= (CHUNKS + 3 - 1) * STAGE_S + wires
            await room.quiet()

    run(main)
    assert len(times) == 3 * CHUNKS
    for (stage, chunk), (began, _) in times.items():
        ready = [times[place][1] for place in ((stage - 1, chunk), (stage, chunk - 1)) if place in times]
        assert 0.0 <= began - max(ready, default=began) < STAGE_S / 2, f"stage {stage} begins chunk {chunk} when it can"
