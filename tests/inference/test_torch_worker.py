"""Real workers over a real, tiny model: split, batched, replayed; uneven lengths in one batch (case C33)."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import trio
import trio.testing

torch = pytest.importorskip("torch", reason="needs the engine extra")

from meshd.errors import ModelRefused, NeedRows, RangeNotHeld  # noqa: E402  # after the check for the extra
from meshd.inference.engine import Choice, Run, Sampling  # noqa: E402
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions  # noqa: E402
from meshd.vocabulary import LayerRange, ModelSpec, SessionId  # noqa: E402
from tests.inference.stage.checkpoints import LAYERS, VOCABULARY, reference  # noqa: E402

pytestmark = pytest.mark.torch

WHOLE = LayerRange(0, LAYERS)
FRONT, BACK = LayerRange(0, 2), LayerRange(2, LAYERS)
SPEC = ModelSpec("tiny", "d", "bf16", LAYERS, 64, VOCABULARY, (1,) * LAYERS, 1, 1, False, 1, 256)
PROMPTS = {"a": [5, 6, 7], "b": [i % 90 for i in range(60)], "c": [3 * i % 90 for i in range(17)]}
OPTIONS = WorkerOptions(threads=1, prefill_rows=32)


def ids_of(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


async def through(engine: WorkerEngine, session: str, start: int, ids: list[int], prompt_len: int) -> Choice:
    """One step over the two halves, as two hops would ask for it; rows travel as bytes."""
    emit = len(ids)
    more = {"session": SessionId(session), "start": start, "n": len(ids), "prompt_len": prompt_len}
    front = await engine.run(Run(layers=FRONT, emit=emit, rows=ids_of(*ids), **more))  # type: ignore[arg-type]  # a mixed dict
    back = Run(
        SessionId(session + "-back"), BACK, start, len(ids), 1, prompt_len, front.rows, sampling=Sampling(logprobs=3)
    )
    return (await engine.run(back)).choices[0]


async def answer(engine: WorkerEngine, name: str, tokens: int) -> list[Choice]:
    prompt = PROMPTS[name]
    choices = [await through(engine, name, 0, prompt, len(prompt))]
    while len(choices) < tokens:
        at = len(prompt) + len(choices) - 1
        choices.append(await through(engine, name, at, [choices[-1].token], len(prompt)))
    return choices


async def whole(engine: WorkerEngine, session: str, ids: list[int], prompt_len: int, emit: int) -> tuple[Choice, ...]:
    run = Run(SessionId(session), WHOLE, 0, len(ids), emit, prompt_len, ids_of(*ids), sampling=Sampling(logprobs=3))
    return (await engine.run(run)).choices


async def uneven_company(engine: WorkerEngine) -> dict[str, list[Choice]]:
    """Three sessions at once; one finishes early."""
    found: dict[str, list[Choice]] = {}

    async def one(name: str, tokens: int) -> None:
        found[name] = await answer(engine, name, tokens)

    async with trio.open_nursery() as nursery:
        for name, tokens in (("a", 16), ("b", 16), ("c", 5)):
            nursery.start_soon(one, name, tokens)
    return found


async def check_answers(engine: WorkerEngine, model: object) -> None:
    together = await uneven_company(engine)
    for name, choices in together.items():
        prompt = PROMPTS[name]
        assert choices == await answer(engine, name, len(choices)), "company changes nothing, not one bit"
        tokens = [choice.token for choice in choices]
        replayed = await whole(engine, name + "-again", prompt + tokens[:-1], len(prompt), len(tokens))
        assert list(replayed) == choices, "cut in two or whole, step by step or replayed: the same"
        assert [choice.position for choice in choices] == list(range(len(prompt), len(prompt) + len(tokens)))
        logits = model(torch.tensor([prompt])).logits[0, -1].detach().float()  # type: ignore[operator]  # transformers' model
        assert abs(float(logits[tokens[0]]) - choices[0].logit) < 0.05


async def check_errors(engine: WorkerEngine) -> None:
    with pytest.raises(NeedRows) as need:
        await through(engine, "new", 4, [1], 4)
    assert need.value.have == 0
    with pytest.raises(RangeNotHeld) as held:
        await engine.forward(LayerRange(0, LAYERS + 1), ids_of(1), 1)
    assert held.value.held == WHOLE


async def check_stateless(engine: WorkerEngine) -> None:
    prompt = PROMPTS["c"]
    residual = await engine.forward(WHOLE, ids_of(*prompt), len(prompt))
    logits = await engine.lm_head(residual[-128:], 1)
    row = struct.unpack(f"<{VOCABULARY}f", logits)
    (choice,) = await whole(engine, "stateless", prompt, len(prompt), 1)
    assert row.index(max(row)) == choice.argmax
    rows = await engine.boundary(SessionId("c"), FRONT, 0, len(prompt))
    assert rows == await engine.forward(FRONT, ids_of(*prompt), len(prompt))


async def check_drop(engine: WorkerEngine) -> None:
    assert engine.health().tick > 0
    for name in PROMPTS:
        for session in (name, name + "-back", name + "-again"):
            engine.drop(SessionId(session))
    engine.drop(SessionId("stateless"))
    while engine.health().sessions or engine.health().kv_used_bytes:
        await trio.testing.wait_all_tasks_blocked(0.01)
    with pytest.raises(NeedRows):
        await engine.boundary(SessionId("c"), FRONT, 0, 1)


def test_a_worker_from_load_to_end(tmp_path: Path) -> None:
    model = reference("llama", tmp_path, torch.bfloat16)
    log: list[str] = []
    parts: list[float] = []

    async def scenario() -> None:
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                engine = await WorkerEngine.spawn(
                    nursery, tmp_path, SPEC, WHOLE, generation=1, log=log.append, options=OPTIONS, progress=parts.append
                )
                assert engine.info.deterministic, engine.info.warnings
                assert parts[-1] == 1.0
                assert engine.info.layer_ms_1 > 0
                await check_answers(engine, model)
                await check_errors(engine)
                await check_stateless(engine)
                await check_drop(engine)
                await engine.aclose()

    trio.run(scenario)
    assert log == [], "a quiet worker"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                with pytest.raises(ModelRefused):
                    await WorkerEngine.spawn(nursery, tmp_path, SPEC, WHOLE, generation=1, log=print)

    trio.run(scenario)


@pytest.mark.model
def test_smollm2_knows_a_capital(smollm2: Path) -> None:
    layers = LayerRange(0, 30)
    spec = ModelSpec("SmolLM2-135M", "d", "bf16", 30, 576, 49152, (1,) * 30, 1, 1, True, 768, 8192)
    prompt = [504, 3575, 282, 4649, 314]

    async def scenario() -> None:
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                engine = await WorkerEngine.spawn(
                    nursery, smollm2, spec, layers, generation=1, log=print, options=OPTIONS
                )
                assert engine.info.deterministic
                (choice,) = (
                    await engine.run(
                        Run(SessionId("s"), layers, 0, 5, 1, 5, ids_of(*prompt), reserve_tokens=64, sampling=Sampling())
                    )
                ).choices
                assert (choice.position, choice.token) == (5, 7042)
                await engine.aclose()

    trio.run(scenario)
