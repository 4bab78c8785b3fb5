"""Guesses through real workers: the same tokens, logits and probabilities, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

torch = pytest.importorskip("torch", reason="needs the engine extra")

from meshd.chain.drafts import NgramDrafts  # noqa: E402  # after the check for the extra
from meshd.chain.request import GenerationRequest  # noqa: E402
from meshd.inference.engine import Sampling  # noqa: E402
from meshd.models.spec import open_folder, read_spec  # noqa: E402
from meshd.vocabulary import LayerRange, ModelSpec  # noqa: E402
from tests.chain.worker_room import WorkerRoom, worker_room  # noqa: E402
from tests.inference.stage.checkpoints import LAYERS, VOCABULARY, reference  # noqa: E402
from tests.sim.chain_faults import ScriptedDrafts  # noqa: E402

pytestmark = pytest.mark.torch

TINY = ModelSpec("tiny", "d", "bf16", LAYERS, 64, VOCABULARY, (1,) * LAYERS, 1, 1, False, 1, 256)
TOKENS = 32


async def check(room: WorkerRoom, prompt: tuple[int, ...], sampling: Sampling) -> int:
    """How many guesses of a lookup came true; all that is exact is asserted."""
    request = GenerationRequest(prompt, TOKENS, sampling=sampling, deadline_s=None)
    room.drafts = None
    plain = await room.ask(request)
    assert plain.finished.timings.drafted_tokens == 0
    ids = (*prompt, *(choice.token for choice in plain.choices))
    room.drafts = lambda _request: ScriptedDrafts(ids, random.Random(1))
    scripted = await room.ask(request)
    assert 0 < scripted.finished.timings.accepted_tokens < scripted.finished.timings.drafted_tokens
    assert scripted.choices == plain.choices, "tokens, greedy ids, logits and probabilities, every bit"
    room.drafts = lambda _request: NgramDrafts()
    looked_up = await room.ask(request)
    assert looked_up.choices == plain.choices
    return looked_up.finished.timings.accepted_tokens


def within(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(240):
            await test()

    trio.run(bounded)


def test_a_tiny_model(tmp_path: Path) -> None:
    reference("llama", tmp_path, torch.bfloat16)

    async def scenario() -> None:
        async with worker_room(tmp_path, TINY, [LayerRange(0, 2), LayerRange(2, LAYERS)]) as room:
            prompt = tuple(5 * i % 90 for i in range(37))
            await check(room, prompt, Sampling(logprobs=3))
            await check(room, prompt, Sampling(temperature=0.8, top_p=0.9, seed=11, logprobs=2))

    within(scenario)


@pytest.mark.model
def test_smollm2_copies_a_list(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    spec = read_spec(open_folder(smollm2), "smollm2-135m", "d")
    names = "Anna Kowalska, Bertrand Lefevre, Chiara Rossi, Dmitri Volkov"
    text = f"The names: {names}.\nThe same names again: Anna Kowalska, Bertrand"
    prompt = tuple(Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids)

    async def scenario() -> None:
        async with worker_room(smollm2, spec, [LayerRange(0, 15), LayerRange(15, 30)]) as room:
            assert await check(room, prompt, Sampling()) > 0
            await check(room, prompt, Sampling(temperature=0.7, seed=3, logprobs=1))

    within(scenario)
