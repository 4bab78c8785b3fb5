"""What a stage more costs a token beyond its compute: 1, 2 and 3 real daemons on loopback, with a mesh key (TLS) and without.

The model is the hash model, which computes little, so a token's time is the chain's own: entry, links, hops. ``compute_ms`` is
what the stages say they computed for a token, together; ``gap_ms`` what a token takes beyond that, in the median. The first
daemon is the entry and the first stage. Streams alternate between the three rooms, so that all meet the same noise; the claim
is the difference between neighbours, ``more_than_one_less_ms``. Processor time per token comes from the kernel's scheduler
(nanoseconds, all threads of a process); the least of all rounds is told, being the one that shared caches and cores with the
fewest others. ``sends`` counts the TCP segments with data between daemons a token (needs ``ss``): S stages are S half-trips.

The reference of the same run is a ring of bare processes (`_ring`): trio, a socket and trio's TLS, which pass on a message of a
step's size and do nothing with it, as many half-trips as the room has. ``floor_ms`` is a round's share of each and
``floors`` how many times that one more stage costs; ``floor_cpu_us`` is what a process that passes on takes for a message.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import Recorder, quantiles
from benchmarks._ring import Ring
from meshd.cli.local_room import LocalRoom
from meshd.identity.mesh_key import KeyRing, MeshKey, save

LAYERS = 30
STAGES = (1, 2, 3)
TOKENS = 150
ROUNDS = 10
WARM_UP = 20
PROMPT = "The lighthouse"


@dataclass(slots=True)
class Taken:
    """What was measured in one room."""

    gaps_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    sends: list[float] = field(default_factory=list)
    floor_ms: list[float] = field(default_factory=list)
    floor_cpu_us: list[float] = field(default_factory=list)


def run() -> None:
    recorder = Recorder("hop_cost")
    for wire in ("plain", "tls"):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as rooms:
            key = new_mesh_key(Path(folder)) if wire == "tls" else []
            model = f"hash:{LAYERS},step_ms=0"
            opened = {stages: rooms.enter_context(LocalRoom(model, common=key)) for stages in STAGES}
            for stages, room in opened.items():
                _start(room, stages)
            rings = {stages: rooms.enter_context(Ring(stages, wire)) for stages in STAGES if stages > 1}
            for stages, room in opened.items():
                room.wait(nodes=stages, timeout_s=60)
                stream(room, WARM_UP, prompt=PROMPT)
            for ring in rings.values():
                ring.rounds_ms(WARM_UP)
            taken = {stages: Taken() for stages in STAGES}
            for _ in range(ROUNDS):
                for stages, room in opened.items():
                    _measure(room, taken[stages])
                for stages, ring in rings.items():
                    _measure_floor(ring, taken[stages])
        _report(recorder, wire, taken)


def new_mesh_key(folder: Path) -> list[str]:
    """Flags of a daemon under a key of its own."""
    path = folder / "mesh.key"
    save(path, KeyRing((MeshKey.generate(),)))
    return ["--mesh-key", str(path)]


def _start(room: LocalRoom, stages: int) -> None:
    for i in range(stages):
        room.add(f"n{i + 1}", "--layers", f"{LAYERS * i // stages}..{LAYERS * (i + 1) // stages}")


def _measure(room: LocalRoom, taken: Taken) -> None:
    before, segments = cpu_ns(room), _segments(room)
    streamed = stream(room, TOKENS, prompt=PROMPT)
    taken.gaps_ms += streamed.gaps_ms
    taken.compute_ms.append(streamed.compute_ms)
    for name, spent in cpu_ns(room).items():
        taken.cpu_us.setdefault(name, []).append((spent - before[name]) / 1e3 / TOKENS)
    after = _segments(room)
    if segments is not None and after is not None:
        taken.sends.append((after - segments) / TOKENS)


def _measure_floor(ring: Ring, taken: Taken) -> None:
    passer = ring.passers[0].pid
    before = process_cpu_ns(passer)
    taken.floor_ms += ring.rounds_ms(TOKENS)
    taken.floor_cpu_us.append((process_cpu_ns(passer) - before) / 1e3 / TOKENS)


def _report(recorder: Recorder, wire: str, taken: dict[int, Taken]) -> None:
    last = 0.0
    for stages, found in taken.items():
        spread = quantiles(found.gaps_ms)
        each = {name: round(min(spent)) for name, spent in found.cpu_us.items()}
        compute_ms = statistics.median(found.compute_ms)
        gap_ms = spread["p50"] - compute_ms
        more_ms = gap_ms - last
        more = {} if stages == STAGES[0] else {"more_than_one_less_ms": more_ms, **_floor(found, stages, more_ms)}
        fast = sorted(found.gaps_ms)[len(found.gaps_ms) // 10]
        sends = {"sends": statistics.median(found.sends)} if found.sends else {}
        beyond = {"compute_ms": compute_ms, "gap_ms": gap_ms}
        recorder.row(
            wire=wire, stages=stages, unit="ms/token", **spread, p10=fast, **beyond, **more, cpu_us=each, **sends
        )
        last = gap_ms


def _floor(found: Taken, stages: int, more_ms: float) -> dict[str, float]:
    """What one process more takes in a ring of ``stages``, each of its half-trips being alike, beside ``more_ms``."""
    floor_ms = statistics.median(found.floor_ms) / stages
    return {"floor_ms": floor_ms, "floors": more_ms / floor_ms, "floor_cpu_us": round(min(found.floor_cpu_us))}


@dataclass(slots=True)
class Streamed:
    """One answer as its client saw it: when it was asked for, its tokens and when each came (seconds), and what its stages
    computed for a token, together."""

    began: float
    tokens: list[int]
    times: list[float]
    compute_ms: float = 0.0

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in itertools.pairwise(self.times)]


def stream(room: LocalRoom, count: int, **prompt: object) -> Streamed:
    """One streamed answer through the first node, by a client that does as little as it can."""
    node = next(iter(room.nodes.values()))
    connection = http.client.HTTPConnection(node.http, timeout=60)
    body = json.dumps({**prompt, "max_tokens": count, "stream": True})
    answer = Streamed(time.perf_counter(), [], [])
    connection.request("POST", "/chain", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    while line := response.readline():
        if line.startswith(b'data: {"tokens"'):
            now = time.perf_counter()
            tokens = json.loads(line[6:])["tokens"]
            answer.tokens += tokens
            answer.times += [now] * len(tokens)
        elif b'"route"' in line:
            answer.compute_ms = sum(hop["compute_ms"] for hop in json.loads(line[6:])["route"])
    connection.close()
    return answer


def cpu_ns(room: LocalRoom) -> dict[str, int]:
    """Processor time of each daemon so far, its threads together."""
    return {name: process_cpu_ns(node.process.pid) for name, node in room.nodes.items() if node.process is not None}


def process_cpu_ns(pid: int) -> int:
    """Processor time of one process so far, its threads together. Linux only."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def _segments(room: LocalRoom) -> int | None:
    """TCP segments with data that the room's daemons have sent each other; None where nobody counts them."""
    if shutil.which("ss") is None:
        return None
    listing = subprocess.run(["ss", "-tinOH", "-p"], capture_output=True, text=True, check=True).stdout
    http_ports = {node.http.rpartition(":")[2] for node in room.nodes.values()}
    total = 0
    for line in listing.splitlines():
        ours = any(node.process is not None and f"pid={node.process.pid}," in line for node in room.nodes.values())
        local = line.split()[3].rpartition(":")[2] if ours else ""
        found = re.search(r"data_segs_out:(\d+)", line)
        if ours and local not in http_ports and found:
            total += int(found.group(1))
    return total


if __name__ == "__main__":
    run()
