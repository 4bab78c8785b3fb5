"""Kills and freezes in mid-answer: every answer must equal the undisturbed one; how long does the stream stall?

A room of an entry without layers and two replicas of each half. For each fault a stream runs through the entry; at a given
token a stage of the route it uses (or two adjacent ones) gets SIGKILL or SIGSTOP; the tokens are compared with the undisturbed
ones; the stall is the longest gap between pieces minus the median gap, as the client sees it. Real processes, real sockets.

``KILL_FAULTS`` (200) on the hash model, ``KILL_FAULTS_SMOLLM2`` (40) on SmolLM2-135M; 0 skips.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Recorder, quantiles
from meshd.cli.local_room import LocalRoom
from meshd.cli.models import ensure

TOKENS = 64
MOMENTS = (0, 1, 2, 20, 63)  # after so many tokens; 0 = in prefill
PROMPT = "Tell me a story about a lighthouse. " * 8


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str  # reset (SIGKILL) or silence (SIGSTOP)
    stages: tuple[int, ...]  # which hops of the running route
    after: int  # tokens


def faults(count: int, seed: int) -> list[Fault]:
    """Every combination in turn, then random ones, in random order."""
    rng = random.Random(seed)
    every = [Fault(k, s, a) for k in ("reset", "silence") for s in ((0,), (1,), (0, 1)) for a in MOMENTS]
    found = (every * (count // len(every) + 1))[:count]
    rng.shuffle(found)
    return found


class Bench:
    def __init__(self, room: LocalRoom, record: Recorder, model: str) -> None:
        self.room, self.record, self.model = room, record, model
        self.stalls: dict[str, list[float]] = defaultdict(list)
        self.wrong = self.failed = 0
        self.expected, _, _ = self.stream(None)

    def stream(self, fault: Fault | None) -> tuple[list[int], float, list[str]]:
        """Tokens, stall in ms, who was hit."""
        tokens: list[int] = []
        gaps: list[float] = []
        hit: list[str] = []
        with self.room.client("e0") as client:
            last = time.monotonic()
            if fault is not None and fault.after == 0:
                # The route is not known before the first piece: pin one, and strike while its prefill runs.
                hit = [f"n{stage + 1}" for stage in fault.stages]
                pinned: dict[str, Any] = {"route": ["n1", "n2"]}
            else:
                pinned = {}
            pieces = client.stream(PROMPT, max_tokens=TOKENS, **pinned)
            if hit and fault is not None:
                self.strike(fault, hit)
            for piece in pieces:
                now = time.monotonic()
                if tokens and piece.tokens:
                    gaps.append(now - last)
                last = now
                tokens += piece.tokens
                if fault is not None and not hit and len(tokens) >= fault.after:
                    hit = [piece.route[stage] for stage in fault.stages]
                    self.strike(fault, hit)
        stall = (max(gaps) - statistics.median(gaps)) * 1e3 if gaps else 0.0
        return tokens, stall, hit

    def strike(self, fault: Fault, names: Sequence[str]) -> None:
        for name in names:
            (self.room.kill if fault.kind == "reset" else self.room.freeze)(name)

    def one(self, fault: Fault) -> None:
        try:
            tokens, stall_ms, hit = self.stream(fault)
        except Exception as error:  # noqa: BLE001  # whatever went wrong is a failed fault, counted and shown
            self.failed += 1
            self.record.row(model=self.model, fault=str(fault), error=f"{type(error).__name__}: {error}")
            tokens, stall_ms, hit = [], 0.0, [n for n, node in self.room.nodes.items() if not node.alive]
        else:
            if tokens != self.expected:
                self.wrong += 1
                self.record.row(model=self.model, fault=str(fault), wrong=tokens)
            self.stalls[fault.kind].append(stall_ms)
        for name in hit:
            self.room.thaw(name)
            self.room.start(name)
        self.room.wait(replicas=2, timeout_s=60, at=["e0"])

    def report(self, count: int) -> None:
        for kind, stalls in sorted(self.stalls.items()):
            self.record.row(model=self.model, kind=kind, stall_ms=quantiles(stalls))
        self.record.row(model=self.model, faults=count, wrong=self.wrong, failed=self.failed)


def run_on(model: str, store: Path | None, num_layers: int, count: int, *flags: str) -> None:
    record = Recorder("kill")
    half = num_layers // 2
    with LocalRoom(model, store=store, common=["--threads", "1", "--preset", "room", *flags]) as room:
        for i, layers in enumerate((f"0..{half}", f"{half}..{num_layers}") * 2):
            room.add(f"n{i + 1}", "--layers", layers)
        room.add("e0", "--capacity-mb", "0")
        room.wait(nodes=5, replicas=2, timeout_s=120)
        bench = Bench(room, record, model)
        for fault in faults(count, seed=1):
            bench.one(fault)
        bench.report(count)


def run() -> None:
    count = int(os.environ.get("KILL_FAULTS", "200"))
    if count:
        run_on("hash:30,step_ms=10", None, 30, count)
    count = int(os.environ.get("KILL_FAULTS_SMOLLM2", "40"))
    if count:
        spec, store = ensure("smollm2-135m")
        run_on(spec.name, store, spec.num_layers, count)
