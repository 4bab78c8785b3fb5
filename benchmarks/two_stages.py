"""Two daemons with half of SmolLM2 each against one process with all of it: what does the chain cost a real model?

Three lanes, one stream each, one thread a worker: one engine worker driven from this process (no daemon, no chain), one daemon
with every layer, and two daemons with half the layers each, under a mesh key (TLS). The lanes take turns in every round, so that
all meet the same noise; a round's ratios are of that round, and the median round is told. Also the time to the first token of a
prompt of 512 tokens, against ``transformers`` too, with one thread and with as many as the two stages have together. The lanes
must say the same tokens; nothing is guessed, since the bare worker's driver does not guess.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import trio

from benchmarks import Recorder
from benchmarks import _greedy as greedy
from benchmarks._clients import random_ids
from benchmarks.hop_cost import Streamed, new_mesh_key, stream
from meshd.cli.local_room import LocalRoom
from meshd.cli.models import ensure
from meshd.cli.room import state_dir
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.models.store import ModelStore
from meshd.vocabulary import LayerRange, ModelSpec, SessionId

MODEL = "smollm2-135m"
TOKENS = 96
PROMPT_TOKENS = 16
LONG_PROMPT_TOKENS = 512
ROUNDS = 4
READY_S = 180
LANES = ("one_worker", "one_daemon", "two_daemons")
REFERENCE_THREADS = (1, 2)
_REFERENCE = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
with torch.inference_mode():
    for line in sys.stdin:
        ids, threads = json.loads(line)
        torch.set_num_threads(threads)
        prompt = torch.tensor([ids])
        began = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
        print((time.perf_counter() - began) * 1e3, flush=True)
"""
Lane = Callable[[Sequence[int], int], Streamed]


class Transformers:
    """``transformers`` in a process of its own: how long until its first token, in milliseconds."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _REFERENCE, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def first_ms(self, prompt: Sequence[int], threads: int) -> float:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipe to the reference")
        self._process.stdin.write(json.dumps([list(prompt), threads]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(slots=True)
class Taken:
    """One lane's rounds."""

    tokens_per_s: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)


def run() -> None:
    recorder = Recorder("two_stages")
    spec, store = ensure(MODEL)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as rooms:
        key = new_mesh_key(Path(folder))
        half = spec.num_layers // 2
        common = [*key, "--threads", "1"]
        one, two = (rooms.enter_context(LocalRoom(MODEL, store=store, common=common)) for _ in range(2))
        _start(one, [f"0..{spec.num_layers}"])
        _start(two, [f"0..{half}", f"{half}..{spec.num_layers}"])
        trio.run(_compare, recorder, spec, {"one_daemon": _asks(one), "two_daemons": _asks(two)})


def _start(room: LocalRoom, ranges: Sequence[str]) -> None:
    for i, layers in enumerate(ranges):
        room.add(f"n{i + 1}", "--layers", layers)
    room.wait(nodes=len(ranges), timeout_s=READY_S)


def _asks(room: LocalRoom) -> Lane:
    return lambda prompt, tokens: stream(room, tokens, tokens=list(prompt), drafts=False)


async def _compare(recorder: Recorder, spec: ModelSpec, lanes: dict[str, Lane]) -> None:
    async with trio.open_nursery() as nursery:
        stored = ModelStore.under(state_dir(None)).find(MODEL)
        if stored is None:
            raise RuntimeError(f"{MODEL} is not in the store")
        layers = LayerRange(0, spec.num_layers)
        engine = await WorkerEngine.spawn(
            nursery, stored.path, spec, layers, generation=1, log=print, options=WorkerOptions(threads=1)
        )

        async def measure(lane: str, prompt: Sequence[int], tokens: int) -> Streamed:
            if lane == "one_worker":
                return await _drive(engine, prompt, tokens)
            return await trio.to_thread.run_sync(lanes[lane], prompt, tokens)

        taken = {lane: Taken() for lane in LANES}
        theirs: dict[int, list[float]] = {threads: [] for threads in REFERENCE_THREADS}
        with contextlib.closing(Transformers(stored.path)) as reference:
            for number in range(-1, ROUNDS):  # the first one warms up
                await _round(number, spec, taken, measure)
                for threads, found in theirs.items():
                    prompt = random_ids(f"{number} {threads}", LONG_PROMPT_TOKENS, spec.vocab_size)
                    first_ms = await trio.to_thread.run_sync(reference.first_ms, prompt, threads)
                    if number >= 0:
                        found.append(first_ms)
        _report(recorder, taken, theirs)
        await engine.aclose()
        nursery.cancel_scope.cancel()


async def _round(
    number: int,
    spec: ModelSpec,
    taken: dict[str, Taken],
    measure: Callable[[str, Sequence[int], int], Awaitable[Streamed]],
) -> None:
    rng = random.Random(number)
    short, long = (
        [rng.randrange(100, spec.vocab_size) for _ in range(count)] for count in (PROMPT_TOKENS, LONG_PROMPT_TOKENS)
    )
    said: dict[str, list[int]] = {}
    for lane in rng.sample(LANES, len(LANES)):
        answer = await measure(lane, short, TOKENS)
        said[lane] = answer.tokens
        first = await measure(lane, long, 1)
        if number >= 0:
            taken[lane].tokens_per_s.append((len(answer.times) - 1) / (answer.times[-1] - answer.times[0]))
            taken[lane].first_ms.append((first.times[0] - first.began) * 1e3)
    if any(tokens != said["one_worker"][: len(tokens)] for tokens in said.values()):
        raise RuntimeError(f"the lanes say different tokens: {said}")


async def _drive(engine: WorkerEngine, prompt: Sequence[int], count: int) -> Streamed:
    """Greedy, as an entry would, without anything in between."""
    answer = Streamed(time.perf_counter(), [], [])
    session, rows, at = SessionId(f"{random.getrandbits(128):032x}"), list(prompt), 0
    while len(answer.tokens) < count:
        total = len(prompt) + count
        choices = await greedy.step(engine, session, rows, at, prompt_len=len(prompt), reserve_tokens=total)
        at += len(rows)
        rows = [choices[0].token]
        answer.tokens.append(rows[0])
        answer.times.append(time.perf_counter())
    engine.drop(session)
    return answer


def _report(recorder: Recorder, taken: dict[str, Taken], theirs: dict[int, list[float]]) -> None:
    reference = taken["one_worker"]
    for lane, found in taken.items():
        rates = [mine / its for mine, its in zip(found.tokens_per_s, reference.tokens_per_s, strict=True)]
        firsts = [mine / its for mine, its in zip(found.first_ms, reference.first_ms, strict=True)]
        recorder.row(
            lane=lane,
            tokens_per_s=statistics.median(found.tokens_per_s),
            ms_per_token=1e3 / statistics.median(found.tokens_per_s),
            rate_to_one_worker=statistics.median(rates),
            first_ms_512=statistics.median(found.first_ms),
            first_to_one_worker=statistics.median(firsts),
        )
    for threads, found_ms in theirs.items():
        ratios = [mine / its for mine, its in zip(taken["two_daemons"].first_ms, found_ms, strict=True)]
        recorder.row(
            lane="transformers",
            threads=threads,
            first_ms_512=statistics.median(found_ms),
            two_daemons_to_it=statistics.median(ratios),
        )


if __name__ == "__main__":
    run()
