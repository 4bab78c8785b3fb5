"""A real model in a real room: a stage dies in mid-answer, a worker dies under its daemon, and what each process takes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import MB, children, mapped_bytes, noise, streamed, until

pytestmark = [pytest.mark.daemon, pytest.mark.model]
PROMPT = "Once upon a time, in a lighthouse by the sea, there lived"
TOKENS = 40


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_stage_dies_in_mid_answer(smollm2_room: LocalRoom, kind: str) -> None:
    def strike(_names: list[str]) -> None:
        (smollm2_room.kill if kind == "kill" else smollm2_room.freeze)("n2")

    with smollm2_room.client("n1") as client:
        undisturbed = client.post("/chain", {"prompt": PROMPT, "max_tokens": TOKENS, "route": ["n3"]})
        seen = streamed(client, strike=strike, after=10, prompt=PROMPT, max_tokens=TOKENS, route=["n1", "n2"])
    assert seen.tokens == undisturbed["tokens"]
    (lost,) = seen.final["recoveries"]
    assert (lost["from"], lost["to"], lost["exact"]) == ("n2", "n3", True)


def test_a_worker_dies_under_its_daemon(smollm2_room: LocalRoom) -> None:
    daemon = smollm2_room.nodes["n2"].process
    assert daemon is not None
    workers = engine_workers(daemon.pid)
    os.kill(workers[0], signal.SIGKILL)
    with smollm2_room.client("n1") as client:
        answer = client.post("/chain", {"prompt": PROMPT, "max_tokens": 4})
        assert [hop["name"] for hop in answer["route"]][-1] == "n3"
    until(lambda: engine_workers(daemon.pid) not in ([], workers), "another worker was started")
    smollm2_room.wait(replicas=2, timeout_s=120)
    assert daemon.poll() is None
    assert "Traceback" not in noise(smollm2_room, "n2")
    with smollm2_room.client("n1") as client:
        again = client.post("/chain", {"prompt": PROMPT, "max_tokens": 4, "route": ["n1", "n2"]})
    assert again["tokens"] == answer["tokens"]


def test_what_the_processes_take(smollm2_room: LocalRoom) -> None:
    with smollm2_room.client("n1") as client:
        client.post("/chain", {"prompt": PROMPT, "max_tokens": 4, "route": ["n1", "n2"]})
        model = client.get("/mesh/model")
    for name in ("n1", "n2", "n3"):
        process = smollm2_room.nodes[name].process
        assert process is not None
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        for library in ("torch", "numpy", "tokenizers", "safetensors"):
            assert f"/{library}/" not in mapped
        assert mapped_bytes(process.pid, "VmRSS") <= 64 * MB
    process = smollm2_room.nodes["n2"].process
    assert process is not None
    (worker,) = engine_workers(process.pid)
    # Weights are pages of the file. The worker's own are its runtime, its KV and, where memory allows, prepacked copies of
    # the linears of its half, head included: those count against the node's capacity and are no runtime.
    copies = sum(model["layer_bytes"][15:]) + model["head_bytes"]
    assert mapped_bytes(worker, "RssAnon") <= 400 * MB + copies


def engine_workers(pid: int) -> list[int]:
    """The torch processes below a daemon."""
    found = []
    for child in children(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"meshd.inference.worker" in command:
            found.append(child)
    return found
