"""Rooms that can be struck: `Loopback` (processes of this host) and `Box` (hosts of their own on one switch).

Owns how each kind of strike is done and undone. A `Box` has a mesh key, so its links are TLS and its clients need the API key;
its clients live on a host of their own, the last one. It must not know who is struck when.

Kills end the daemon and its workers with SIGKILL; a blackhole loses whatever is sent *to* the device, a partition also what it
sends; neither leaves a trace that a socket could notice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

from meshd.cli.chaos.netlab import NetLab
from meshd.cli.chaos.schedule import LASTS_S, OUTAGE, Strike
from meshd.cli.local_room import LocalRoom
from meshd.config import MESH_PORT
from meshd.errors import LocalError
from meshd.identity import mesh_key
from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.vocabulary import LayerRange

PROCESS_KINDS: Final = ("kill", "restart", "freeze")
_CUTS: Final = frozenset({"blackhole", "partition"})


class Struck(Protocol):
    """A room under strikes."""

    room: LocalRoom
    kinds: Sequence[str]

    def strike(self, one: Strike) -> None: ...

    def release(self, one: Strike) -> None: ...

    def inside(self) -> AbstractContextManager[None]:
        """Where the calling thread must be to reach the nodes."""
        ...


class Loopback:
    """Processes of this host: they can be killed and frozen."""

    def __init__(self, room: LocalRoom) -> None:
        self.room = room
        self.kinds: Sequence[str] = PROCESS_KINDS

    def strike(self, one: Strike) -> None:
        """Do it."""
        for name in one.nodes:
            if one.kind in ("kill", "restart", OUTAGE):
                self.room.kill(name)
            elif one.kind == "wipe":
                self.room.wipe(name)
            elif one.kind == "freeze":
                self.room.freeze(name)
            else:
                raise LocalError(f"processes of one host cannot suffer a {one.kind}")

    def release(self, one: Strike) -> None:
        """Undo it."""
        for name in one.nodes:
            self.room.thaw(name)
            self.room.start(name)

    def inside(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Box(Loopback):
    """Hosts with addresses, behind a switch that can lose what is sent. A context manager's product: see `boxed`."""

    def __init__(self, room: LocalRoom, net: NetLab) -> None:
        super().__init__(room)
        self.net = net
        self.kinds = tuple(LASTS_S)
        self._hosts: dict[str, int] = {}
        self._cut: list[Strike] = []

    def add(self, name: str, *flags: str) -> None:
        """A node on the next host; it is told of all the others' addresses."""
        host = len(self._hosts)
        self._hosts[name] = host
        others = [f"{self.net.address(i)}:{MESH_PORT}" for i in range(self.net.hosts - 1) if i != host]
        known = ("--join", ",".join(others), "--mesh-key", str(self.room.home / "mesh.key"))
        within = self.net.words(host, ())
        self.room.add(name, *flags, *known, host=self.net.address(host), join=False, within=within)

    def strike(self, one: Strike) -> None:
        """Do it."""
        if one.kind in _CUTS:
            self._cut.append(one)
            self._cut_all()
        else:
            super().strike(one)

    def release(self, one: Strike) -> None:
        """Undo it, and nothing else."""
        if one.kind in _CUTS:
            self._cut.remove(one)
            self._cut_all()
        else:
            super().release(one)

    def _cut_all(self) -> None:
        self.net.only_cut(pair for one in self._cut for pair in self._pairs(one))

    def _pairs(self, one: Strike) -> Iterator[tuple[int, int]]:
        for host in (self._hosts[name] for name in one.nodes):
            for other in (other for other in range(self.net.hosts) if other != host):
                yield other, host
                if one.kind == "partition":
                    yield host, other

    def inside(self) -> AbstractContextManager[None]:
        return self.net.inside(self.net.hosts - 1)


@contextlib.contextmanager
def boxed(model: str, places: Mapping[str, LayerRange | None], *flags: str, store: Path | None = None) -> Iterator[Box]:
    """A room of daemons on hosts of their own, started, not yet whole. ``places``: who holds what."""
    with NetLab(len(places) + 1) as net, LocalRoom(model, store=store, common=flags) as room:
        ring = KeyRing((MeshKey.generate(),))
        mesh_key.save(room.home / "mesh.key", ring)
        room.key = ring.api_key()
        box = Box(room, net)
        for name, layers in places.items():
            box.add(name, *(("--capacity-mb", "0") if layers is None else ("--layers", str(layers))))
        yield box
