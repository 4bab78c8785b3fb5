"""Rooms of real daemons, for tests: what is asked of them, what they must answer, and what a stream does while they die.

The rehearsal model answers are known without any room (`expected`), so a test compares tokens instead of believing them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshd.cli.local_room import LocalRoom, free_ports
from meshd.client import Client
from meshd.errors import MeshdError
from meshd.inference.hash_stage import reference

LAYERS = 30
MB = 1 << 20
MODEL = "hash:30,step_ms=10,layer_mb=1"
FLAGS = ("--capacity-mb", "200")
PROMPT = "Tell me a story about a lighthouse. " * 4
HALVES = ("0..15", "15..30")
PATIENCE_S = 120.0  # this device may be busy with anything; no test waits that long when all is well


def expected(prompt: str, tokens: int) -> list[int]:
    """What any room serving `MODEL` must answer."""
    return reference(tuple(prompt.encode()), tokens, LAYERS)


def chat_ids(*messages: tuple[str, str]) -> str:
    """The prompt that the rehearsal model's template makes."""
    return "".join(f"{role}: {content}\n" for role, content in messages) + "assistant: "


def tried(call: Callable[[], Any]) -> Any:
    """What ``call`` returns; None while it is refused or nobody is there."""
    try:
        return call()
    except MeshdError:
        return None


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Wait for a condition; its value."""
    give_up = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.05)
    return value


@dataclass
class Streamed:
    """What a client got: ids in order, the last event, and who was struck."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    final: Any = None
    struck: list[str] = field(default_factory=list)


def streamed(
    client: Client,
    *,
    strike: Callable[[list[str]], None] | None = None,
    hops: tuple[int, ...] = (),
    after: int = 0,
    prompt: str = PROMPT,
    max_tokens: int = 64,
    **body: Any,
) -> Streamed:
    """One answer; after so many tokens ``strike`` is called with the names of the ``hops`` that compute it."""
    seen = Streamed()
    for piece in client.stream(prompt, max_tokens=max_tokens, patience_s=PATIENCE_S, **body):
        seen.tokens += piece.tokens
        seen.text += piece.text
        seen.final = piece.final or seen.final
        if strike is not None and not seen.struck and piece.route and len(seen.tokens) >= after:
            seen.struck = [piece.route[hop] for hop in hops]
            strike(seen.struck)
    return seen


def whole(room: LocalRoom, replicas: int) -> None:
    """Everything that was hurt is back."""
    for name in room.nodes:
        room.thaw(name)
        room.start(name)
    room.wait(replicas=replicas, timeout_s=PATIENCE_S)


def four_halves(room: LocalRoom) -> None:
    """Two replicas of each half, and an entry without layers."""
    for i, layers in enumerate(HALVES * 2):
        room.add(f"n{i + 1}", "--layers", layers, *FLAGS)
    room.add("e0", "--capacity-mb", "0")
    room.wait(nodes=5, replicas=2, timeout_s=PATIENCE_S)


def halves_and_whole(room: LocalRoom) -> None:
    """A real model in two halves, and whole beside them: a replica of either and the reference for both."""
    for name, layers in (("n1", "0..15"), ("n2", "15..30"), ("n3", "0..30")):
        room.add(name, "--layers", layers, "--capacity-mb", "1500")
    room.wait(nodes=3, replicas=2, timeout_s=3 * PATIENCE_S)


def daemon(*flags: str, home: Path, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Start a daemon that is expected to end by itself."""
    return meshd("start", "--state-dir", str(home), "--no-mdns", *flags, timeout_s=timeout_s)


def meshd(*arguments: str, timeout_s: float = PATIENCE_S, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "meshd", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def one_line(text: str) -> str:
    """The only line of ``text``."""
    lines = text.splitlines()
    assert len(lines) == 1, f"one line was due:\n{text}"
    return lines[0]


def ended(room: LocalRoom, name: str, number: int = signal.SIGTERM) -> int:
    """Send a signal and wait for the daemon's end; its exit status."""
    process = room.nodes[name].process
    assert process is not None
    room.signal(name, number)
    return process.wait(PATIENCE_S)


def idle(room: LocalRoom) -> Iterator[str]:
    """What still runs or is remembered anywhere, node by node."""
    for name, node in room.nodes.items():
        if node.alive:
            with room.client(name) as client:
                status = client.get("/status")
            for key in ("in_flight", "kv_sessions", "queue_depth"):
                if status[key]:
                    yield f"{name}: {key} {status[key]}"


def ports(host: str = "127.0.0.1", count: int = 2) -> list[str]:
    """Free addresses."""
    where = f"[{host}]" if ":" in host else host
    return [f"{where}:{port}" for port in free_ports(host, count)]


def noise(room: LocalRoom, name: str) -> str:
    """What a daemon wrote besides its event log: warnings, tracebacks."""
    lines = room.nodes[name].log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("{"))


def mapped_bytes(pid: int, key: str) -> int:
    """A size of a process, out of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {key}")


def children(pid: int) -> list[int]:
    """Processes that any thread of ``pid`` started and that are still there."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
