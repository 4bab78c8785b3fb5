"""Real daemons on loopback, killed, restarted, left: when does everybody know? Beside Serf (Debian's package) in the same run.

For each size a room of members without a model; kills by SIGKILL, restarts, a graceful leave, a newcomer. Times run from the
signal (or the ``listening`` line) to the moment the last survivor says so. Of Serf's agents only those that probed say whom they
suspect: a kill of which not all survivors say so has no such time. Bytes are what a node's gossip sent and received, from
``/metrics``, with 28 bytes of IP and UDP header a datagram. ``MEMBERSHIP_SIZES`` (5,10,20), ``MEMBERSHIP_KILLS`` (4).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from benchmarks import Recorder, quantiles
from meshd.cli.local_room import LocalRoom, free_ports

CAP_S = 60.0
STEADY_S = 10.0
HEADER_BYTES = 28


class Room(Protocol):
    """A room of either kind."""

    kind: str

    def add(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...
    def leave(self, name: str) -> None: ...
    def start(self, name: str) -> None: ...
    def seen(self, observer: str, what: str, about: str, since: float) -> float | None: ...
    def born(self, name: str, since: float) -> float | None: ...
    def names(self) -> list[str]: ...
    def bytes_per_s(self) -> float | None: ...
    def close(self) -> None: ...


class Meshd:
    """Our daemons; times are those of their event logs."""

    kind = "meshd"

    def __init__(self) -> None:
        self.room = LocalRoom("")

    def add(self, name: str) -> None:
        self.room.add(name, "--preset", "room")

    def kill(self, name: str) -> None:
        self.room.kill(name)

    def leave(self, name: str) -> None:
        self.room.signal(name, signal.SIGTERM)

    def start(self, name: str) -> None:
        self.room.start(name)

    def names(self) -> list[str]:
        return [name for name, node in self.room.nodes.items() if node.alive]

    def seen(self, observer: str, what: str, about: str, since: float) -> float | None:
        for event in self.room.nodes[observer].events():
            if event["t"] >= since and event["ev"] == what and event["name"] == about:
                return float(event["t"]) - since
        return None

    def born(self, name: str, since: float) -> float | None:
        times = (float(e["t"]) for e in self.room.nodes[name].events() if e["ev"] == "listening")
        return next((at for at in times if at >= since), None)

    def bytes_per_s(self) -> float | None:
        before, began = self._traffic(), time.monotonic()
        time.sleep(STEADY_S)
        after = self._traffic()
        each = [(after[name] - before[name]) / (time.monotonic() - began) for name in after]
        return statistics.mean(each)

    def _traffic(self) -> dict[str, float]:
        found = {}
        for name in self.names():
            with self.room.client(name) as client:
                text = client.text("/metrics")
            sent_bytes = _metric(text, "meshd_gossip_sent_bytes_total")
            packets = _metric(text, "meshd_gossip_packets_sent_total")
            found[name] = sent_bytes + HEADER_BYTES * packets
        return found

    def close(self) -> None:
        self.room.close()


def _metric(text: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


SERF_LINES = {
    "failed": re.compile(r"serf: EventMemberFailed: (\S+)"),
    "join": re.compile(r"serf: EventMemberJoin: (\S+)"),
    "left": re.compile(r"serf: EventMemberLeave: (\S+)"),
    "suspect": re.compile(r"memberlist: Suspect (\S+) has failed"),
}


class Serf:
    """Serf agents with the LAN profile; times are those at which their lines were read."""

    kind = "serf"

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="serf-room-"))
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.ports: dict[str, list[int]] = {}
        self.lines: dict[str, list[tuple[float, str, str]]] = {}

    def add(self, name: str) -> None:
        self.ports[name] = free_ports("127.0.0.1", 2)
        self.start(name)

    def start(self, name: str) -> None:
        bind, rpc = self.ports[name]
        first = next(iter(self.ports))
        peer = f"127.0.0.1:{self.ports[first][0]}"
        join = [] if name == first else [f"-retry-join={peer}", "-retry-interval=1s"]
        command = ["serf", "agent", f"-node={name}", f"-bind=127.0.0.1:{bind}", f"-rpc-addr=127.0.0.1:{rpc}"]
        command += ["-profile=lan", "-log-level=info", *join]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.home)
        self.running[name] = process
        self.lines.setdefault(name, []).append((time.time(), "listening", name))
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            for what, pattern in SERF_LINES.items():
                match = pattern.search(line)
                if match is not None:
                    self.lines[name].append((time.time(), what, match[1]))

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()

    def leave(self, name: str) -> None:
        self.running.pop(name).send_signal(signal.SIGINT)

    def names(self) -> list[str]:
        return list(self.running)

    def seen(self, observer: str, what: str, about: str, since: float) -> float | None:
        for at, ev, name in self.lines[observer]:
            if at >= since and ev == what and name == about:
                return at - since
        return None

    def born(self, name: str, since: float) -> float | None:
        return next((at for at, what, _ in self.lines[name] if what == "listening" and at >= since), None)

    def bytes_per_s(self) -> float | None:
        return None  # its agents do not tell

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
        shutil.rmtree(self.home, ignore_errors=True)


def _all_see(room: Room, what: str, about: str, since: float, observers: Iterable[str]) -> float | None:
    """Seconds until the last observer saw it; None when one did not in time."""
    waiting, last, give_up = set(observers), 0.0, time.time() + CAP_S
    while waiting and time.time() < give_up:
        for observer in list(waiting):
            after = room.seen(observer, what, about, since)
            if after is not None:
                last = max(last, after)
                waiting.discard(observer)
        time.sleep(0.05)
    return None if waiting else last


def _measure(room: Room, size: int, kills: int, record: Recorder) -> None:
    rng = random.Random(size)
    for i in range(size):
        room.add(f"n{i}")
    everybody = room.names()
    for name in everybody:
        _all_see(room, "join", name, 0.0, [o for o in everybody if o != name])
    found: dict[str, list[float]] = {key: [] for key in ("suspect", "dead", "restart", "join", "leave")}
    steady = room.bytes_per_s()
    for _ in range(kills):
        victim = rng.choice(everybody[1:])
        others = [name for name in everybody if name != victim]
        time.sleep(rng.random())
        since = time.time()
        room.kill(victim)
        _note(found["dead"], _all_see(room, "failed", victim, since, others))
        said = [after for each in others if (after := room.seen(each, "suspect", victim, since)) is not None]
        if len(said) == len(others):
            found["suspect"].append(max(said))
        since = time.time()
        room.start(victim)
        _note(found["restart"], _since_birth(room, victim, since, others))
    since = time.time()
    room.add("late")
    _note(found["join"], _since_birth(room, "late", since, everybody))
    since = time.time()
    room.leave("late")
    _note(found["leave"], _all_see(room, "left", "late", since, everybody))
    figures = {f"{key}_s": quantiles(values) for key, values in found.items()}
    record.row(daemon=room.kind, nodes=size, kills=kills, sent_bytes_per_s=steady, **figures)


def _since_birth(room: Room, name: str, since: float, observers: Iterable[str]) -> float | None:
    """Seconds from its own first word after ``since``, which the others may hear before it is in its log."""
    after, give_up = _all_see(room, "join", name, since, observers), time.time() + CAP_S
    while (born := room.born(name, since)) is None and time.time() < give_up:
        time.sleep(0.05)
    return None if after is None or born is None else max(0.0, since + after - born)


def _note(values: list[float], value: float | None) -> None:
    values.append(CAP_S if value is None else value)


def run() -> None:
    record = Recorder("membership")
    sizes = [int(part) for part in os.environ.get("MEMBERSHIP_SIZES", "5,10,20").split(",")]
    kills = int(os.environ.get("MEMBERSHIP_KILLS", "4"))
    kinds: list[type[Meshd] | type[Serf]] = [Meshd]
    if shutil.which("serf"):
        kinds.append(Serf)
    else:
        record.row(skipped="serf is not installed: apt-get install serf")
    for size in sizes:
        for kind in kinds:
            room = kind()
            try:
                _measure(room, size, kills, record)
            finally:
                room.close()
