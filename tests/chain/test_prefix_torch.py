"""What is kept of prompts, through real workers: answers and probabilities are the same, bit for bit, warm and cold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

torch = pytest.importorskip("torch", reason="needs the engine extra")

from meshd.chain.drafts import NgramDrafts  # noqa: E402  # after the check for the extra
from meshd.chain.request import GenerationRequest  # noqa: E402
from meshd.inference.engine import Sampling  # noqa: E402
from meshd.vocabulary import MB, LayerRange, ModelSpec  # noqa: E402
from tests.chain.worker_room import OPTIONS, worker_room  # noqa: E402
from tests.inference.stage.checkpoints import LAYERS, VOCABULARY, reference  # noqa: E402

pytestmark = pytest.mark.torch

TINY = ModelSpec("tiny", "d", "bf16", LAYERS, 64, VOCABULARY, (1,) * LAYERS, 1, 1, False, 1, 256)
PROMPT = tuple(5 * i % 90 for i in range(133))
RANGES = [LayerRange(0, 2), LayerRange(2, LAYERS)]


def test_warm_equals_cold(tmp_path: Path) -> None:
    reference("llama", tmp_path, torch.bfloat16)

    async def scenario() -> None:
        async with worker_room(tmp_path, TINY, RANGES) as room:
            request = GenerationRequest(PROMPT, 12, sampling=Sampling(logprobs=3), tenant="a", deadline_s=None)
            cold = await room.ask(request)
            assert cold.finished.cached_tokens == 0
            warm = await room.ask(request)
            assert warm.finished.cached_tokens == 132
            assert warm.choices == cold.choices, "tokens, logits and probabilities, every bit"
            first = await room.ask(replace(request, max_tokens=1))
            assert first.choices == cold.choices[:1]
            assert [hop.compute_ms for hop in first.finished.route] == [0.0, 0.0], "nothing was computed"
            drawn = replace(request, sampling=Sampling(temperature=1.0, seed=7, logprobs=3))
            assert (await room.ask(drawn)).choices == (await room.ask(replace(drawn, tenant="e"))).choices
            other = await room.ask(replace(request, tenant="b"))
            assert other.finished.cached_tokens == 0
            assert other.choices == cold.choices

            blocks = replace(request, prompt=PROMPT[:128], tenant="a")
            warm = await room.ask(blocks)
            assert warm.finished.cached_tokens == 127, "all but the row that draws"
            cold = await room.ask(replace(blocks, tenant="d"))
            assert cold.finished.cached_tokens == 0
            assert warm.choices == cold.choices

            turn = replace(request, prompt=(*PROMPT, *(choice.token for choice in cold.choices), *PROMPT[:40]))
            second = await room.ask(turn)
            assert second.finished.cached_tokens == 128, "a longer prompt goes on after whole blocks"
            again = await room.ask(replace(turn, tenant="b", prompt=turn.prompt))
            assert again.choices == second.choices
            room.drafts = lambda _request: NgramDrafts()
            fresh = await room.ask(replace(turn, tenant="c"))
            assert fresh.finished.cached_tokens == 0
            assert fresh.choices == second.choices

    async def off() -> None:
        options = replace(OPTIONS, prefix_bytes=0, kv_bytes=64 * MB)
        async with worker_room(tmp_path, TINY, RANGES, options) as room:
            for _ in range(2):
                out = await room.ask(GenerationRequest(PROMPT, 2, deadline_s=None))
                assert out.finished.cached_tokens == 0

    async def bounded() -> None:
        with trio.fail_after(240):
            await scenario()
            await off()

    trio.run(bounded)
