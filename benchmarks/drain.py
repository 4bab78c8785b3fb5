"""Planned drains under load: every node in turn hands its work over; does any answer fail, how long does any stream stall?

Two replicas of each half and an entry without layers; 8 clients that never stop, at random entries. Each node in turn is drained
(``meshd drain``), waited for, and resumed; then each is told to stop (SIGTERM), waited for, and started again. Answers are
compared with the undisturbed ones; a stall is a gap between two pieces less the usual gap of that answer.

``DRAIN_ROUNDS`` (3) on the hash model, ``DRAIN_ROUNDS_SMOLLM2`` (1) on SmolLM2-135M with 2 clients; 0 skips.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from pathlib import Path

from benchmarks import Recorder, quantiles
from meshd.cli.chaos.box import Loopback
from meshd.cli.chaos.clients import Clients
from meshd.cli.chaos.verdict import Asked
from meshd.cli.local_room import LocalRoom
from meshd.cli.models import ensure

PROMPTS = ("Tell me a story about a lighthouse. " * 8, "And now one about the sea. " * 12)
TOKENS = 96
PATIENCE_S = 180.0
PAUSE_S = 2.0  # of plain load between two drains


class Bench:
    """A room under load."""

    def __init__(self, room: LocalRoom, clients: int) -> None:
        self.room = room
        self.answers: list[Asked] = []
        self.took: dict[str, list[float]] = {"drain": [], "leave": []}
        began = time.monotonic()
        self.clients = Clients(
            Loopback(room),
            PROMPTS,
            count=clients,
            seed=1,
            body={"max_tokens": TOKENS},
            clock=lambda: time.monotonic() - began,
            heard=self.answers.append,
        )

    def run(self, rounds: int) -> tuple[int, list[float]]:
        """Failures, and the longest gap of each answer."""
        with self.room.client() as client:
            expected = [self.clients.ask(client, i).tokens for i in range(len(PROMPTS))]
        self.clients.start()
        try:
            for _ in range(rounds):
                for name in self.room.nodes:
                    self.drain(name)
                for name in self.room.nodes:
                    self.leave(name)
        finally:
            self.clients.stop(PATIENCE_S)
        failed = sum(bool(one.code) or one.tokens != expected[one.prompt] for one in self.answers)
        return failed + self.clients.hanging, [stall_s(one) for one in self.answers]

    def drain(self, name: str) -> None:
        """As `meshd drain` and `meshd resume` do."""
        with self.room.client(name) as client:
            began = time.monotonic()
            client.post("/admin/drain")
            while (status := client.get("/status"))["owned"] or status["relayed"]:
                time.sleep(0.05)
            self.took["drain"].append(time.monotonic() - began)
            time.sleep(PAUSE_S)
            client.post("/admin/resume")
        self.whole()

    def leave(self, name: str) -> None:
        """As a service manager ends it."""
        process = self.room.nodes[name].process
        assert process is not None
        began = time.monotonic()
        self.room.signal(name, signal.SIGTERM)
        process.wait(PATIENCE_S)
        self.took["leave"].append(time.monotonic() - began)
        self.room.start(name)
        self.whole()

    def whole(self) -> None:
        self.room.wait(replicas=2, timeout_s=PATIENCE_S)
        time.sleep(PAUSE_S)


def stall_s(one: Asked) -> float:
    """The longest gap beyond the usual one."""
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(one.times)]
    return max(gaps) - statistics.median(gaps) if gaps else 0.0


def run_on(model: str, store: Path | None, num_layers: int, rounds: int, clients: int, *flags: str) -> None:
    record = Recorder("drain")
    half = num_layers // 2
    with LocalRoom(model, store=store, common=["--threads", "1", *flags]) as room:
        for i, layers in enumerate((f"0..{half}", f"{half}..{num_layers}") * 2):
            room.add(f"n{i + 1}", "--layers", layers)
        room.add("e0", "--capacity-mb", "0")
        room.wait(nodes=5, replicas=2, timeout_s=PATIENCE_S)
        bench = Bench(room, clients)
        failed, stalls = bench.run(rounds)
        name = model.partition(",")[0]
        record.row(model=name, answers=len(stalls), failed=failed, stall_s=quantiles(stalls))
        for kind, took in bench.took.items():
            record.row(model=name, what=kind, took_s=quantiles(took))
        for one in (one for one in bench.answers if one.code):
            record.row(model=name, code=one.code, message=one.message, after=len(one.tokens))


def run() -> None:
    rounds = int(os.environ.get("DRAIN_ROUNDS", "3"))
    if rounds:
        run_on("hash:30,step_ms=20,layer_mb=1", None, 30, rounds, 8, "--capacity-mb", "200")
    rounds = int(os.environ.get("DRAIN_ROUNDS_SMOLLM2", "1"))
    if rounds:
        spec, store = ensure("smollm2-135m")
        run_on(spec.name, store, spec.num_layers, rounds, 2, "--capacity-mb", "1500")
