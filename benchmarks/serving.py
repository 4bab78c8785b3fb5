"""Many clients over HTTP at once: one daemon with all of SmolLM2 serves 1, 8 and 16 streams; two daemons with half each serve 8.

One process: tokens a second of all clients together against one client's, both while everybody decodes. Two stages: one thread a
worker, 8 clients, against one process of one thread with 8 clients: the ratio is above 1 only as far as both stages work at the
same time. Prompts are random ids of 100 tokens, nothing is guessed, every client's tokens are compared with its solo run. Rounds
alternate; ratios are of one round. ``SERVING_THREADS`` (2): of the one process; its clients and daemon share the same cores.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import trio

from benchmarks import Recorder
from benchmarks._clients import ask, random_ids, rate, together
from benchmarks.hop_cost import new_mesh_key
from meshd.cli.local_room import LocalRoom, Node
from meshd.cli.models import ensure
from meshd.vocabulary import ModelSpec

MODEL = "smollm2-135m"
PROMPT_TOKENS = 100
TOKENS = 64
ROUNDS = 3
CLIENTS = (1, 8, 16)
READY_S = 180
Client = tuple[dict[str, Any], list[int]]  # a request and its answer


def run() -> None:
    recorder = Recorder("serving")
    spec, store = ensure(MODEL)
    threads = os.environ.get("SERVING_THREADS", "2")
    with LocalRoom(MODEL, store=store, common=["--threads", threads]) as room:
        _one_process(recorder, _start(room, f"0..{spec.num_layers}"), spec, threads)
    half = spec.num_layers // 2
    with tempfile.TemporaryDirectory() as folder, ExitStack() as rooms:
        common = [*new_mesh_key(Path(folder)), "--threads", "1"]
        one, two = (rooms.enter_context(LocalRoom(MODEL, store=store, common=common)) for _ in range(2))
        nodes = _start(one, f"0..{spec.num_layers}"), _start(two, f"0..{half}", f"{half}..{spec.num_layers}")
        _two_stages(recorder, *nodes, spec)


def _start(room: LocalRoom, *ranges: str) -> Node:
    """The room's entry, once everybody is ready."""
    for number, layers in enumerate(ranges):
        room.add(f"n{number + 1}", "--layers", layers, "--prefix-cache-mb", "0")
    room.wait(nodes=len(ranges), timeout_s=READY_S)
    return next(iter(room.nodes.values()))


def _one_process(recorder: Recorder, node: Node, spec: ModelSpec, threads: str) -> None:
    solo = trio.run(_alone, node, spec)
    rates: dict[int, list[float]] = {clients: [] for clients in CLIENTS}
    for number in range(ROUNDS):
        for clients in CLIENTS:
            found = trio.run(_tokens_per_s, node, solo[:clients])
            if number or clients > 1:  # the very first warms up
                rates[clients].append(found)
    alone = statistics.median(rates[1])
    for clients in CLIENTS:
        together_per_s = statistics.median(rates[clients])
        recorder.row(
            what="one process",
            threads=int(threads),
            clients=clients,
            tokens_per_s=together_per_s,
            of_one_client=together_per_s / alone,
        )


def _two_stages(recorder: Recorder, one: Node, two: Node, spec: ModelSpec) -> None:
    solo = trio.run(_alone, one, spec)
    ratios, rates = [], []
    for number in range(-1, ROUNDS):
        single, staged = (trio.run(_tokens_per_s, node, solo[:8]) for node in (one, two))
        if number >= 0:
            ratios.append(staged / single)
            rates.append((single, staged))
    single, staged = (statistics.median(column) for column in zip(*rates, strict=True))
    recorder.row(
        what="two stages",
        threads=1,
        clients=8,
        tokens_per_s=staged,
        one_process_tokens_per_s=single,
        of_one_process=statistics.median(ratios),
    )


async def _alone(node: Node, spec: ModelSpec) -> list[Client]:
    """Requests with what each is told when nobody else asks; none of them meets an end token."""
    clients: list[Client] = []
    for number in itertools.count():
        prompt = random_ids(number, PROMPT_TOKENS, spec.vocab_size)
        body: dict[str, Any] = {"tokens": prompt, "max_tokens": TOKENS, "drafts": False}
        told = (await ask(node, **body)).tokens
        if len(told) == TOKENS:
            clients.append((body, told))
        if len(clients) == max(CLIENTS):
            break
    return clients


async def _tokens_per_s(node: Node, clients: Sequence[Client]) -> float:
    answers = await together(node, [body for body, _ in clients])
    for number, (answer, (_, told)) in enumerate(zip(answers, clients, strict=True)):
        if answer.tokens != told:
            raise RuntimeError(f"client {number} of {len(clients)} was told other tokens than alone")
    return rate(answers)


if __name__ == "__main__":
    run()
