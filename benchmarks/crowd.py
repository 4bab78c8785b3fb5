"""Crowds: 640 streams of 32 people at once, each compared with its solo run, and 500 clients that vanish in mid-answer.

SmolLM2 in two daemons of one thread. The people ask with prompts and seeds of their own, half of them sampling, and every token
must be what the same request is told when nobody else asks. Then clients come in waves and close their connections without a
word, some before the first token, some between two: what is told is how long it takes until no daemon has a request in flight or
a session left, and what the processes have grown by.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import psutil
import trio

from benchmarks import Recorder
from benchmarks._clients import ask, connect, random_ids
from meshd.cli.local_room import LocalRoom, Node
from meshd.cli.models import ensure
from meshd.client import Client
from meshd.vocabulary import ModelSpec

MODEL = "smollm2-135m"
PEOPLE, STREAMS = 32, 640
REQUESTS = 64  # different ones: each stream draws one of them
PROMPT_TOKENS, TOKENS = 16, 8
WAVES, WAVE = 4, 125
STAYS_S = 1.0  # the longest that a vanishing client stays
READY_S, GONE_S = 180, 30.0


def run() -> None:
    recorder = Recorder("crowd")
    spec, store = ensure(MODEL)
    half = spec.num_layers // 2
    with LocalRoom(MODEL, store=store, common=["--threads", "1", "--max-sessions", "128"]) as room:
        room.add("n1", "--layers", f"0..{half}", "--capacity-mb", "1500")
        room.add("n2", "--layers", f"{half}..{spec.num_layers}", "--capacity-mb", "1500")
        room.wait(nodes=2, timeout_s=READY_S)
        trio.run(_vanish, recorder, room, spec)
        trio.run(_equal, recorder, room.nodes["n1"], spec)


async def _equal(recorder: Recorder, node: Node, spec: ModelSpec) -> None:
    bodies = [_body(spec, number) for number in range(REQUESTS)]
    solo = [(await ask(node, **body)).tokens for body in bodies]
    different = 0

    async def person(number: int) -> None:
        nonlocal different
        rng = random.Random(number)
        for _ in range(STREAMS // PEOPLE):
            drawn = rng.randrange(REQUESTS)
            different += (await ask(node, **bodies[drawn])).tokens != solo[drawn]

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(PEOPLE):
            nursery.start_soon(person, number)
    recorder.row(
        what="streams", people=PEOPLE, streams=STREAMS, different=different, took_s=time.perf_counter() - began
    )
    if different:
        raise RuntimeError(f"{different} of {STREAMS} streams were told other tokens than alone")


def _body(spec: ModelSpec, number: int) -> dict[str, Any]:
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 2 else {"temperature": 0}
    return {"tokens": random_ids(f"crowd {number}", PROMPT_TOKENS, spec.vocab_size), "max_tokens": TOKENS, **sampled}


async def _vanish(recorder: Recorder, room: LocalRoom, spec: ModelSpec) -> None:
    await _wave(room.nodes["n1"], spec, -1)
    await _until_idle(room)
    before, waits = memory_bytes(room), []
    for wave in range(WAVES):
        await _wave(room.nodes["n1"], spec, wave)
        waits.append(await _until_idle(room))
    after = memory_bytes(room)
    grown = {pid: after[pid] / size - 1 for pid, size in before.items()}
    daemons = {node.process.pid for node in room.nodes.values() if node.process is not None}
    recorder.row(
        what="vanished",
        clients=WAVES * WAVE,
        idle_after_s=max(waits),
        daemons_grown_by=max(grown[pid] for pid in daemons),
        workers_grown_by=max(more for pid, more in grown.items() if pid not in daemons),
    )


async def _wave(node: Node, spec: ModelSpec, wave: int) -> None:
    """Clients that come at once and leave one after the other without reading to the end."""

    async def one(number: int) -> None:
        rng = random.Random(f"{wave} {number}")
        prompt = random_ids(f"gone {wave} {number}", PROMPT_TOKENS, spec.vocab_size)
        stream = await connect(node, tokens=prompt, max_tokens=1000)
        await trio.sleep(rng.uniform(0.0, STAYS_S))
        await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        for number in range(WAVE):
            nursery.start_soon(one, number)


async def _until_idle(room: LocalRoom) -> float:
    """Seconds until no daemon has anything left of them."""
    began = time.perf_counter()
    while True:
        states = [await trio.to_thread.run_sync(_status, node) for node in room.nodes.values()]
        waited = time.perf_counter() - began
        if not any(state["in_flight"] or state["kv_sessions"] for state in states):
            return waited
        if waited > GONE_S:
            raise RuntimeError(f"still busy after {waited:.0f} s: {states}")
        await trio.sleep(0.02)


def _status(node: Node) -> Mapping[str, Any]:
    with Client(node.url) as client:
        answer: Mapping[str, Any] = client.get("/status")
        return answer


def memory_bytes(room: LocalRoom) -> dict[int, int]:
    """Resident memory of the nodes' processes, workers included."""
    roots = [psutil.Process(node.process.pid) for node in room.nodes.values() if node.process is not None]
    return {
        process.pid: process.memory_info().rss for root in roots for process in (root, *root.children(recursive=True))
    }


if __name__ == "__main__":
    run()
