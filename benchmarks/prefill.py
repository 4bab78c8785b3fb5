"""A prompt of 1,024 tokens through three stages: in chunks that follow each other against all of it stage by stage.

One machine has not a core for each of three stages and a network between them, so the stages' times are measured one by one
(each third of SmolLM2, one thread, chunks of the entry's size) and the time to the end of the last stage is computed as three
devices would take it: a stage begins a chunk when it has finished the one before and the stage before has finished this one.
Wires are left out. That chains really do so is the tests' to show.
"""

from __future__ import annotations

import itertools
import random
import secrets
import statistics
from collections.abc import Sequence

import trio

from benchmarks import Recorder
from benchmarks._clients import random_ids
from meshd.chain.attempts import CHUNK_ROWS, pack_ids
from meshd.cli.models import ensure
from meshd.cli.room import state_dir
from meshd.inference.engine import Run, Sampling
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.models.store import ModelStore
from meshd.vocabulary import LayerRange, ModelSpec, SessionId

MODEL = "smollm2-135m"
PROMPT_TOKENS = 1024
STAGES = 3
ROUNDS = 4
CHUNKS = (64, CHUNK_ROWS, 256, PROMPT_TOKENS)


def run() -> None:
    spec, _ = ensure(MODEL)
    trio.run(_compare, Recorder("prefill"), spec)


async def _compare(recorder: Recorder, spec: ModelSpec) -> None:
    folder = ModelStore.under(state_dir(None)).get(spec.name).path
    cuts = [spec.num_layers * number // STAGES for number in range(STAGES + 1)]
    stages = [LayerRange(start, end) for start, end in itertools.pairwise(cuts)]
    async with trio.open_nursery() as nursery:
        # A tick takes a whole prompt, so that "unchunked" is what it says.
        options = WorkerOptions(threads=1, prefill_rows=PROMPT_TOKENS)
        engine = await WorkerEngine.spawn(nursery, folder, spec, spec.whole, generation=1, log=print, options=options)
        takes: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}
        totals: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}
        for number in range(-1, ROUNDS):
            for chunk in random.Random(number).sample(CHUNKS, len(CHUNKS)):
                times = await _times_ms(engine, stages, random_ids(number, PROMPT_TOKENS, spec.vocab_size), chunk)
                if number >= 0:
                    takes[chunk].append(makespan(times))
                    totals[chunk].append(sum(map(sum, times)))
        for chunk in CHUNKS:
            ratios = [mine / whole for mine, whole in zip(takes[chunk], takes[PROMPT_TOKENS], strict=True)]
            recorder.row(
                tokens=PROMPT_TOKENS,
                stages=STAGES,
                chunk=chunk,
                makespan_ms=statistics.median(takes[chunk]),
                compute_ms=statistics.median(totals[chunk]),
                against_unchunked=statistics.median(ratios),
            )
        await engine.aclose()
        nursery.cancel_scope.cancel()


async def _times_ms(
    engine: WorkerEngine, stages: Sequence[LayerRange], ids: Sequence[int], chunk: int
) -> list[list[float]]:
    """Each chunk's compute at each stage, one after the other."""
    sessions = [SessionId(secrets.token_hex(16)) for _ in stages]  # each stage's own, as on a device of its own
    times = []
    for start in range(0, len(ids), chunk):
        piece = list(ids[start : start + chunk])
        rows, of_chunk = pack_ids(piece), []
        for session, layers in zip(sessions, stages, strict=True):
            last = layers is stages[-1]
            ends = last and start + len(piece) == len(ids)
            ran = await engine.run(
                Run(
                    session=session,
                    layers=layers,
                    start=start,
                    n=len(piece),
                    emit=(1 if ends else 0) if last else len(piece),
                    prompt_len=len(ids),
                    rows=rows,
                    reserve_tokens=len(ids),
                    sampling=Sampling() if last else None,
                )
            )
            rows = ran.rows
            of_chunk.append(ran.compute_ms)
        times.append(of_chunk)
    for session in sessions:
        engine.drop(session)
    return times


def makespan(times: Sequence[Sequence[float]]) -> float:
    """When the last stage has the last chunk, given ``times[chunk][stage]`` and a device for each stage."""
    done = [0.0] * len(times[0])
    for of_chunk in times:
        ready = 0.0
        for stage, took in enumerate(of_chunk):
            ready = done[stage] = max(ready, done[stage]) + took
    return done[-1]


if __name__ == "__main__":
    run()
