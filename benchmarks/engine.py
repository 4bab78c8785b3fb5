"""The engine alone against `transformers`, SmolLM2-135M, same threads, same OMP policy: one stream, and many at once.

``transformers.generate`` runs in a process of its own, our engine in its worker; they take turns, and a round's ratio is of that
round. ``ENGINE_THREADS`` (1,2), ``ENGINE_DTYPES`` (bf16,int8), ``ENGINE_SESSIONS`` (8,16).
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path

import trio

from benchmarks import Recorder
from meshd.chain.attempts import pack_ids
from meshd.cli.models import ensure
from meshd.cli.room import state_dir
from meshd.inference.engine import Run, Sampling
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.models.store import ModelStore
from meshd.vocabulary import SessionId

MODEL = "smollm2-135m"
PROMPT_TOKENS = 100
TOKENS = 64
ROUNDS = 3
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
        one, many = run(1), run(tokens)
        print(json.dumps((tokens - 1) / (many - one)), flush=True)
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
            ours, theirs, ratios = [], [], []
            await _decode(engine, 1, 8)
            for _ in range(ROUNDS):
                theirs.append(_ask(other))
                ours.append(await _decode(engine, 1, TOKENS))
                ratios.append(ours[-1] / theirs[-1])
            record.row(
                threads=threads,
                dtype=dtype,
                arith=engine.info.arith,
                deterministic=engine.info.deterministic,
                tokens_per_s=statistics.median(ours),
                transformers_tokens_per_s=statistics.median(theirs),
                ratio=statistics.median(ratios),
            )
            for sessions in map(int, os.environ.get("ENGINE_SESSIONS", "8,16").split(",")):
                together = await _decode(engine, sessions, TOKENS)
                record.row(
                    threads=threads,
                    dtype=dtype,
                    sessions=sessions,
                    tokens_per_s=together,
                    of_one_session=together / statistics.median(ours),
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


async def _decode(engine: WorkerEngine, sessions: int, tokens: int) -> float:
    """Tokens per second of all sessions together, their prompts not counted."""
    names = [SessionId(secrets.token_hex(16)) for _ in range(sessions)]  # new ones: a drop is not waited for
    firsts = [await _step(engine, name, IDS, 0) for name in names]

    async def one(name: SessionId, token: int) -> None:
        for i in range(tokens - 1):
            token = await _step(engine, name, [token], PROMPT_TOKENS + i)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for name, first in zip(names, firsts, strict=True):
            nursery.start_soon(one, name, first)
    took = time.perf_counter() - began
    for name in names:
        engine.drop(name)
    return sessions * (tokens - 1) / took


async def _step(engine: WorkerEngine, session: SessionId, ids: list[int], start: int) -> int:
    run = Run(
        session,
        engine.info.layers,
        start,
        len(ids),
        1,
        PROMPT_TOKENS,
        pack_ids(ids),
        PROMPT_TOKENS + TOKENS,
        Sampling(),
    )
    return (await engine.run(run)).choices[0].token
