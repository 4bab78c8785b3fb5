"""Many clients over HTTP at once: one daemon with all of SmolLM2 serves 1, 8 and 16 streams; two daemons with half each serve 8.

One process: tokens a second of all clients together against one client's, both while everybody decodes. Two stages: one thread a
worker, 8 clients, against one process of one thread with 8 clients: the ratio is above 1 only as far as both stages work at the
same time, and never above what two halves reach that each always have 4 clients (``most_by_alternating``: a step over 8 against
one over 4). Prompts are random ids of 100 tokens, nothing is guessed, and every client must be told the same in each company.
``SERVING_THREADS`` (2): of the one process; its clients and daemon share the same cores.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import trio

from benchmarks import Recorder
from benchmarks._clients import random_ids, rate, together
from benchmarks.hop_cost import new_mesh_key
from meshd.cli.local_room import LocalRoom, Node
from meshd.cli.models import ensure
from meshd.vocabulary import ModelSpec

MODEL = "smollm2-135m"
PROMPT_TOKENS = 100
TOKENS = 48
ROUNDS = 2
SPARE = 4
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
    chosen = trio.run(_chosen, node, spec, max(CLIENTS))
    rates: dict[int, list[float]] = {clients: [] for clients in CLIENTS}
    for _ in range(ROUNDS):
        for clients in CLIENTS:
            rates[clients].append(trio.run(_tokens_per_s, node, chosen[:clients]))
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
    chosen = trio.run(_chosen, one, spec, 8)
    ratios, rates, halves = [], [], []
    for number in range(-1, ROUNDS):
        single, staged = (trio.run(_tokens_per_s, node, chosen) for node in (one, two))
        if number >= 0:
            ratios.append(staged / single)
            rates.append((single, staged))
            halves.append(2.0 * trio.run(_tokens_per_s, one, chosen[:4]) / single)
    single, staged = (statistics.median(column) for column in zip(*rates, strict=True))
    recorder.row(
        what="two stages",
        threads=1,
        clients=8,
        tokens_per_s=staged,
        one_process_tokens_per_s=single,
        of_one_process=statistics.median(ratios),
        most_by_alternating=statistics.median(halves),
    )


async def _chosen(node: Node, spec: ModelSpec, count: int) -> list[Client]:
    """Requests with what each is told in a first round; none of them meets an end token."""
    bodies: list[dict[str, Any]] = [
        {"tokens": random_ids(number, PROMPT_TOKENS, spec.vocab_size), "max_tokens": TOKENS, "drafts": False}
        for number in range(count + SPARE)
    ]
    told = [answer.tokens for answer in await together(node, bodies)]
    clients = [(body, tokens) for body, tokens in zip(bodies, told, strict=True) if len(tokens) == TOKENS]
    if len(clients) < count:
        raise RuntimeError("too many answers end early: take other prompts")
    return clients[:count]


async def _tokens_per_s(node: Node, clients: Sequence[Client]) -> float:
    answers = await together(node, [body for body, _ in clients])
    for number, (answer, (_, told)) in enumerate(zip(answers, clients, strict=True)):
        if answer.tokens != told:
            raise RuntimeError(f"client {number} of {len(clients)} was told other tokens than before")
    return rate(answers)


if __name__ == "__main__":
    run()
