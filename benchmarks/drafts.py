"""Guessed tokens on against off where text repeats itself: SmolLM2 in two stages whose messages take 10 ms each way.

Real workers and real chains in one process; only the links are in memory, because they can be told how long a message takes. The
prompts are copied: a list, a rename in code; and prose, which is not, where guesses must cost next to nothing. Rounds alternate
between off and on, so that both meet the same noise; the tokens must be the same.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import trio

from benchmarks import Recorder
from meshd.chain.drafts import NgramDrafts
from meshd.chain.request import GenerationRequest
from meshd.cli.models import ensure
from meshd.cli.room import state_dir
from meshd.inference.worker_engine import WorkerOptions
from meshd.models.store import ModelStore
from meshd.vocabulary import LayerRange, ModelSpec
from tests.chain.worker_room import Answered, WorkerRoom, worker_room

MODEL = "smollm2-135m"
LATENCY_S = 0.010
TOKENS = 48
ROUNDS = 2

_NAMES = "Anna Kowalska, Bertrand Lefevre, Chiara Rossi, Dmitri Volkov, Elena Petrova, Farid Haddad, Greta Lindholm"
_CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("a side is negative")
    return width * height
"""
PROMPTS = {
    "list": f"The guests: {_NAMES}.\n\nThe same guests once more: {_NAMES}.\n\nThe same guests once more: Anna",
    "rename": f"{_CODE}\n{_CODE.replace('area', 'surface')}\n{_CODE.replace('area', 'extent')}\ndef space(width, height):",
    "prose": "The old lighthouse keeper walked down to the shore and",
}


def run() -> None:
    recorder = Recorder("drafts")
    spec, _ = ensure(MODEL)
    stored = ModelStore.under(state_dir(None)).find(MODEL)
    if stored is None:
        raise RuntimeError(f"{MODEL} is not in the store")
    trio.run(_compare, recorder, spec, stored.path)


async def _compare(recorder: Recorder, spec: ModelSpec, folder: Path) -> None:
    from tokenizers import Tokenizer  # noqa: PLC0415  # benchmarks are listed without the engine extra

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    half = spec.num_layers // 2
    ranges = [LayerRange(0, half), LayerRange(half, spec.num_layers)]
    async with worker_room(folder, spec, ranges, WorkerOptions(threads=1)) as room:
        room.net.latency_s = LATENCY_S
        for name, text in PROMPTS.items():
            await _measure(recorder, room, name, tuple(tokenizer.encode(text).ids))


async def _measure(recorder: Recorder, room: WorkerRoom, name: str, prompt: tuple[int, ...]) -> None:
    ratios, last = [], Answered([], None)  # type: ignore[arg-type]  # replaced in the first round
    await _timed(room, prompt, drafts=False)
    for _ in range(ROUNDS):
        off_s, plain = await _timed(room, prompt, drafts=False)
        on_s, last = await _timed(room, prompt, drafts=True)
        if plain.choices != last.choices:
            raise RuntimeError(f"{name}: guesses changed the answer")
        ratios.append(off_s / on_s)
    timings = last.finished.timings
    recorder.row(
        text=name,
        latency_ms=LATENCY_S * 1e3,
        stages=2,
        tokens=len(last.choices),
        on_against_off=statistics.median(ratios),
        drafted=timings.drafted_tokens,
        accepted=timings.accepted_tokens,
        tokens_per_s=timings.tokens_per_s,
        same_tokens=True,
    )


async def _timed(room: WorkerRoom, prompt: tuple[int, ...], *, drafts: bool) -> tuple[float, Answered]:
    """Seconds from the first token to the last."""
    room.drafts = (lambda _request: NgramDrafts()) if drafts else None
    began = time.perf_counter()
    answer = await room.ask(GenerationRequest(prompt, TOKENS, deadline_s=None))
    return time.perf_counter() - began - answer.finished.timings.ttft_ms / 1e3, answer


if __name__ == "__main__":
    run()
