"""From ``meshd start`` to ready: a half of SmolLM2 in one daemon, alone on the machine.

Ready is the daemon's own ``ready`` event: weights read, the arithmetic tried, the shard proved by the recorded answers. Starts
alternate between the two halves and with the reference: importing torch and the classes of the model, which is the least that
anything built on them waits for. What a worker keeps is told beside it: private memory, and what it has mapped of the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from benchmarks import Recorder, quantiles
from meshd.cli.local_room import LocalRoom, Node
from meshd.cli.models import ensure
from meshd.vocabulary import MB, LayerRange
from tests.rooms import mapped_bytes

MODEL = "smollm2-135m"
ROUNDS = 5
READY_S = 120
WAIT_S = 0.05
_IMPORTS = "import torch, transformers.models.llama.modeling_llama"


def run() -> None:
    recorder = Recorder("start")
    spec, store = ensure(MODEL)
    half = spec.num_layers // 2
    imports: list[float] = []
    taken: dict[LayerRange, list[float]] = {LayerRange(0, half): [], LayerRange(half, spec.num_layers): []}
    kept: dict[LayerRange, Mapping[str, int]] = {}
    for _ in range(ROUNDS):
        imports.append(_imports())
        for layers, found in taken.items():
            seconds, kept[layers] = _start(layers, store)
            found.append(seconds)
    recorder.row(lane="imports alone", unit="s", **quantiles(imports))
    for layers, found in taken.items():
        ratio = min(found) / min(imports)
        recorder.row(lane=f"ready {layers}", unit="s", **quantiles(found), to_imports=ratio, **kept[layers])


def _imports() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return time.monotonic() - began


def _start(layers: LayerRange, store: Path | None) -> tuple[float, dict[str, int]]:
    """Seconds to ready, and the memory of daemon and worker then."""
    with LocalRoom(MODEL, store=store) as room:
        began = time.time()
        node = room.add("n1", "--layers", str(layers))
        while not (said := [float(event["t"]) for event in node.events() if event["ev"] == "ready"]):
            if time.time() > began + READY_S or not node.alive:
                raise RuntimeError(f"not ready after {READY_S} s: {node.log.read_text()[-500:]}")
            time.sleep(WAIT_S)
        return said[0] - began, _memory(node)


def _memory(node: Node) -> dict[str, int]:
    assert node.process is not None
    daemon = psutil.Process(node.process.pid)
    worker = next(child for child in daemon.children() if "meshd.inference.worker" in child.cmdline())
    return {
        "daemon_mb": mapped_bytes(daemon.pid, "VmRSS") // MB,
        "worker_private_mb": mapped_bytes(worker.pid, "RssAnon") // MB,
        "worker_mapped_mb": mapped_bytes(worker.pid, "RssFile") // MB,
    }


if __name__ == "__main__":
    run()
