"""A room of real daemons on loopback: what the demo shows, the tests drive and the benchmarks measure.

Each node is a process of its own with its own state folder, ports and log, exactly as on its own device, except that the nodes
read one model store (their shards are mapped from one physical copy). Nodes are ended by pid, never by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshd.client import Client
from meshd.config import HTTP_PORT, MESH_PORT
from meshd.errors import LocalError, MeshdError


@dataclass(slots=True)
class Node:
    """One daemon. ``flags`` are its own; addresses stay the same over restarts, as a device's would. ``within`` are the words
    before its command (a namespace to run in)."""

    name: str
    home: Path
    http: str
    mesh: str
    flags: list[str]
    within: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    @property
    def log(self) -> Path:
        return self.home.parent / f"{self.name}.log"  # beside the state folder: it outlives a wiped one

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def events(self) -> list[dict[str, Any]]:
        """Every event the node logged so far."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("{"):
                    with contextlib.suppress(ValueError):
                        found.append(json.loads(line))
        return found


@dataclass(slots=True)
class LocalRoom:
    """Daemons on one host. A context manager: leaving it ends them all and removes their folders."""

    model: str
    store: Path | None = None
    host: str = "127.0.0.1"
    common: Sequence[str] = ()
    key: str | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    home: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="meshd-room-")))

    def __enter__(self) -> LocalRoom:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- nodes --------------------------------------------------------------------------------------------------------

    def add(
        self, name: str, *flags: str, host: str | None = None, join: bool = True, within: Sequence[str] = ()
    ) -> Node:
        """Make a node and start it; it joins the first one. A node ``within`` a host of its own has the usual ports."""
        host = host or self.host
        where = f"[{host}]" if ":" in host else host
        ports = (HTTP_PORT, MESH_PORT) if within else free_ports(host, 2)
        http, mesh = (f"{where}:{port}" for port in ports)
        node = Node(name, self.home / name, http, mesh, list(flags), within)
        self._make_home(node)
        if join and self.nodes:
            node.flags += ["--join", next(iter(self.nodes.values())).mesh]
        self.nodes[name] = node
        self.start(name)
        return node

    def _make_home(self, node: Node) -> None:
        node.home.mkdir(parents=True)
        if self.store is not None:
            (node.home / "models").symlink_to(self.store)

    def start(self, name: str) -> None:
        """Start (again): same folder, same addresses."""
        node = self.nodes[name]
        if node.alive:
            return
        command = [
            *node.within,
            *(sys.executable, "-m", "meshd", "start", "--name", name, "--state-dir", str(node.home)),
            *("--http", node.http, "--mesh", node.mesh, "--no-mdns", "--event-log", "json"),
            *(["--model", self.model] if self.model else []),
            *self.common,
            *node.flags,
        ]
        with node.log.open("ab") as out:
            node.process = subprocess.Popen(  # noqa: S603  # our own interpreter with our own arguments
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        node.starts += 1

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the daemon and, for the unkind ones, to its workers too (a device dies as a whole)."""
        node = self.nodes[name]
        if node.process is None or node.process.poll() is not None:
            return
        family = [node.process.pid]
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
            family += _children(node.process.pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            node.process.wait(10)

    def kill(self, name: str) -> None:
        """The device loses power."""
        self.signal(name, signal.SIGKILL)

    def freeze(self, name: str) -> None:
        """The device hangs."""
        self.signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """The device goes on as if nothing had been."""
        self.signal(name, signal.SIGCONT)

    def wipe(self, name: str) -> None:
        """The device loses power and all it knew, its own identity too."""
        node = self.nodes[name]
        self.kill(name)
        shutil.rmtree(node.home)
        self._make_home(node)

    # --- the room -----------------------------------------------------------------------------------------------------

    def client(self, *names: str, timeout_s: float = 60.0) -> Client:
        """A client whose entries are these nodes (default: all)."""
        urls = [self.nodes[name].url for name in names or self.nodes]
        return Client(urls, key=self.key, timeout_s=timeout_s)

    def wait(
        self, *, nodes: int | None = None, replicas: int = 1, timeout_s: float = 60.0, at: Sequence[str] = ()
    ) -> None:
        """Until every node (or those in ``at``) sees so many nodes and every layer held so often. Raises LocalError with
        what the last one lacked and the tail of its log."""
        want = nodes if nodes is not None else sum(node.alive for node in self.nodes.values())
        give_up = time.monotonic() + timeout_s
        for name in at or [name for name, node in self.nodes.items() if node.alive]:
            with self.client(name, timeout_s=5) as client:
                while lacking := _lacking(client, want, replicas):
                    if time.monotonic() >= give_up or not self.nodes[name].alive:
                        tail = "\n".join(self.nodes[name].log.read_text(errors="replace").splitlines()[-15:])
                        raise LocalError(f"{name}: {lacking}\n{tail}")
                    time.sleep(0.1)

    def close(self) -> None:
        """End every node and remove the folders."""
        for name, node in self.nodes.items():
            if node.alive:
                self.thaw(name)
                self.signal(name, signal.SIGTERM)
        for name, node in self.nodes.items():
            if node.process is not None:
                try:
                    node.process.wait(8)
                except subprocess.TimeoutExpired:
                    self.kill(name)
        shutil.rmtree(self.home, ignore_errors=True)


def _lacking(client: Client, nodes: int, replicas: int) -> str:
    """What one node still waits for; "" when it sees all of it."""
    try:
        state, hive = client.get("/status"), client.get("/mesh/hive")
    except MeshdError as error:
        return error.message
    if state["state"] not in ("ready", "observer"):
        return f"{state['state']}: {state['reason']}"
    if hive["nodes"] < nodes or hive["min_replicas"] < replicas:
        return (
            f"sees {hive['nodes']} of {nodes} nodes, {hive['min_replicas']} of {replicas} replicas ({hive['status']})"
        )
    return ""


def free_ports(host: str, count: int) -> list[int]:
    """Ports that are free now, for TCP and UDP."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for tcp in _bound(host, held):
            udp = held.enter_context(socket.socket(_family(host), socket.SOCK_DGRAM))
            with contextlib.suppress(OSError):
                udp.bind((host, tcp))
                found.append(tcp)
            if len(found) == count:
                break
        return found


def _bound(host: str, held: contextlib.ExitStack) -> Iterator[int]:
    while True:
        tcp = held.enter_context(socket.socket(_family(host), socket.SOCK_STREAM))
        tcp.bind((host, 0))
        yield tcp.getsockname()[1]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _children(pid: int) -> list[int]:
    """Pids below ``pid``, from /proc; empty where there is none."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_children(child)]
    return found
