"""The engine alone against `transformers`, SmolLM2-135M, same threads, same OMP policy: one stream, and many at once.

``transformers.generate`` runs in a process of its own, our engine in its worker. The memory of a shared host is twice as fast in
one minute as in the next, so all take many short turns, and a ratio is the median of the rounds' ratios. A turn starts behind the
prompt, which is computed once. ``ENGINE_THREADS`` (1,2), ``ENGINE_DTYPES`` (bf16,int8), ``ENGINE_SESSIONS`` (8,16),
``ENGINE_ROUNDS``.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from benchmarks import Recorder
from benchmarks import _greedy as greedy
from meshd.cli.models import ensure
from meshd.cli.room import state_dir
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.models.store import ModelStore
from meshd.vocabulary import SessionId

MODEL = "smollm2-135m"
PROMPT_TOKENS = 100
TOKENS = 12  # of one turn
ROUNDS = 16
IDS = [1000 + 7 * i for i in range(PROMPT_TOKENS)]

_REFERENCE = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
folder, threads, tokens, ids = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
prompt = torch.tensor([ids])
def run(n):
    began = time.perf_counter()
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n, do_sample=False)
    return time.perf_counter() - began
with torch.inference_mode():
    run(4)
    for line in sys.stdin:
        one, many = run(1), run(tokens + 1)
        print(json.dumps(tokens / (many - one)), flush=True)
"""


def run() -> None:
    record = Recorder("engine")
    spec, _ = ensure(MODEL)
    folder = ModelStore.under(state_dir(None)).get(spec.name).path
    for threads in map(int, os.environ.get("ENGINE_THREADS", "1,2").split(",")):
        for dtype in os.environ.get("ENGINE_DTYPES", "bf16,int8").split(","):
            trio.run(_compare, record, folder, threads, dtype)


async def _compare(record: Recorder, folder: Path, threads: int, dtype: str) -> None:
    name = MODEL if dtype == "bf16" else f"{MODEL}@{dtype}"
    spec = ModelStore.under(state_dir(None)).get(name).spec
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", _REFERENCE, str(folder), str(threads), str(TOKENS), json.dumps(IDS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        async with trio.open_nursery() as nursery:
            options = WorkerOptions(threads=threads, dtype=dtype, max_batch=32)
            engine = await WorkerEngine.spawn(
                nursery, folder, spec, spec.whole, generation=1, log=lambda _line: None, options=options
            )
            sizes = [int(size) for size in os.environ.get("ENGINE_SESSIONS", "8,16").split(",")]
            crowds = [await _Crowd.started(engine, size) for size in (1, *sizes)]
            _ask(other)
            rounds = int(os.environ.get("ENGINE_ROUNDS", str(ROUNDS)))
            turns = [[_ask(other), *[await crowd.turn() for crowd in crowds]] for _ in range(rounds)]
            theirs, ours, *others = zip(*turns, strict=True)
            record.row(
                threads=threads,
                dtype=dtype,
                arith=engine.info.arith,
                deterministic=engine.info.deterministic,
                tokens_per_s=statistics.median(ours),
                transformers_tokens_per_s=statistics.median(theirs),
                ratio=_ratio(ours, theirs),
            )
            for size, together in zip(sizes, others, strict=True):
                record.row(
                    threads=threads,
                    dtype=dtype,
                    sessions=size,
                    tokens_per_s=statistics.median(together),
                    of_one_session=_ratio(together, ours),
                )
            await engine.aclose()
            nursery.cancel_scope.cancel()
        other.kill()


def _ask(other: subprocess.Popen[str]) -> float:
    if other.stdin is None or other.stdout is None:
        raise RuntimeError("no pipe to the reference")
    other.stdin.write("\n")
    other.stdin.flush()
    return float(json.loads(other.stdout.readline()))


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(of, to, strict=True))


class _Crowd:
    """Sessions with the same prompt that decode together."""

    def __init__(self, engine: WorkerEngine, names: list[SessionId], firsts: list[int]) -> None:
        self._engine = engine
        self._firsts = dict(zip(names, firsts, strict=True))

    @classmethod
    async def started(cls, engine: WorkerEngine, size: int) -> _Crowd:
        names = [SessionId(secrets.token_hex(16)) for _ in range(size)]
        crowd = cls(engine, names, [await _step(engine, name, IDS, 0) for name in names])
        await crowd.turn()
        return crowd

    async def turn(self) -> float:
        """Tokens per second of all together; each starts behind its prompt again."""

        async def one(name: SessionId, token: int) -> None:
            for i in range(TOKENS):
                token = await _step(self._engine, name, [token], PROMPT_TOKENS + i)

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for name, first in self._firsts.items():
                nursery.start_soon(one, name, first)
        return len(self._firsts) * TOKENS / (time.perf_counter() - began)


async def _step(engine: WorkerEngine, session: SessionId, ids: list[int], start: int) -> int:
    total = PROMPT_TOKENS + TOKENS
    choices = await greedy.step(engine, session, ids, start, prompt_len=PROMPT_TOKENS, reserve_tokens=total)
    return choices[0].token
