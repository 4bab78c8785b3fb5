"""Planned drains under load: every node in turn hands its work over; does any answer fail, how long does any stream stall?

Two replicas of each half and an entry without layers; 8 clients that never stop, at random entries. Each node in turn is drained
(``meshd drain``), waited for, and resumed; then each is told to stop (SIGTERM), waited for, and started again. Answers are
compared with the undisturbed ones; a stall is a gap between two pieces less the usual gap of that answer. It counts for what
went on then: a drain, a leave, the start of a daemon (which takes the processor from all others here, as it would not from
another device), or nothing.

``DRAIN_ROUNDS`` (3) on the hash model, ``DRAIN_ROUNDS_SMOLLM2`` (1) on SmolLM2-135M with 2 clients; 0 skips.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
        self.took: dict[str, list[float]] = {"drain": [], "leave": [], "start": []}
        self._spans: list[tuple[str, float, float]] = []
        self._began = began = time.monotonic()
        self.clients = Clients(
            Loopback(room),
            PROMPTS,
            count=clients,
            seed=1,
            body={"max_tokens": TOKENS},
            clock=lambda: time.monotonic() - began,
            heard=self.answers.append,
        )

    def run(self, rounds: int) -> int:
        """Failures."""
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
        return failed + self.clients.hanging

    @contextmanager
    def _during(self, kind: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        ended = time.monotonic()
        self.took[kind].append(ended - began)
        self._spans.append((kind, began - self._began, ended - self._began))

    def stalls_s(self) -> dict[str, list[float]]:
        """By what went on: the longest stall of each answer that ran then."""
        longest: dict[str, list[float]] = {}
        for one in self.answers:
            gaps = list(itertools.pairwise(at for at, _ in one.times))
            usual = statistics.median(b - a for a, b in gaps) if gaps else 0.0
            for kind, lengths in itertools.groupby(
                sorted((self._kind(a, b), b - a - usual) for a, b in gaps), key=lambda gap: gap[0]
            ):
                longest.setdefault(kind, []).append(max(length for _, length in lengths))
        return longest

    def _kind(self, from_s: float, until_s: float) -> str:
        return next((kind for kind, a, b in self._spans if a < until_s and from_s < b), "calm")

    def drain(self, name: str) -> None:
        """As `meshd drain` and `meshd resume` do."""
        with self.room.client(name) as client:
            with self._during("drain"):
                client.post("/admin/drain")
                while (status := client.get("/status"))["owned"] or status["relayed"]:
                    time.sleep(0.05)
            time.sleep(PAUSE_S)
            client.post("/admin/resume")
        self.whole()

    def leave(self, name: str) -> None:
        """As a service manager ends it."""
        process = self.room.nodes[name].process
        assert process is not None
        with self._during("leave"):
            self.room.signal(name, signal.SIGTERM)
            process.wait(PATIENCE_S)
        with self._during("start"):
            self.room.start(name)
            self.whole()

    def whole(self) -> None:
        self.room.wait(replicas=2, timeout_s=PATIENCE_S)
        time.sleep(PAUSE_S)


def run_on(model: str, store: Path | None, num_layers: int, rounds: int, clients: int, *flags: str) -> None:
    record = Recorder("drain")
    half = num_layers // 2
    with LocalRoom(model, store=store, common=["--threads", "1", *flags]) as room:
        for i, layers in enumerate((f"0..{half}", f"{half}..{num_layers}") * 2):
            room.add(f"n{i + 1}", "--layers", layers)
        room.add("e0", "--capacity-mb", "0")
        room.wait(nodes=5, replicas=2, timeout_s=PATIENCE_S)
        bench = Bench(room, clients)
        failed = bench.run(rounds)
        name = model.partition(",")[0]
        record.row(model=name, clients=clients, answers=len(bench.answers), failed=failed)
        for kind, stalls in bench.stalls_s().items():
            took = quantiles(bench.took[kind]) if kind in bench.took else None
            record.row(model=name, what=kind, stall_s=quantiles(stalls), took_s=took)
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
