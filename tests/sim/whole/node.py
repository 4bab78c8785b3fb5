"""One simulated device: its daemon, as often as it is started, and what outlives a run of it.

Owns the device's key, its state folder and its count of starts. A killed daemon's tasks are unwound after its sockets are gone,
so nothing that they still do reaches anybody.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from random import Random
from typing import Any, cast

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshd.config import Config, load
from meshd.daemon import Daemon
from meshd.errors import EngineFailed
from meshd.identity.node_key import Identity, NodeKey
from meshd.inference.engine import Engine
from meshd.inference.hash_engine import HashEngine
from meshd.node.sockets import Sockets
from meshd.node.stage_loader import StageLoader
from meshd.vocabulary import Endpoint, LayerRange, NodeId
from tests.sim.whole.net import Listener, Net
from tests.sim.whole.world import NODE, Processes

Tell = Callable[[str, Mapping[str, Any]], None]


class SilentManager:
    """A service manager that wants to know nothing."""

    def send(self, **_fields: str | int) -> None: ...

    async def run(self, _status: Callable[[], str]) -> None: ...


class Disk:
    """How long a device takes to load layers, and how often it cannot."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.slowest_s = rng.choice([0.0, 2.0, 8.0])
        self.failing = rng.choice([0.0, 0.0, 0.1])
        self.wrong = False  # what it computes

    async def read(self, progress: Callable[[str, float], None]) -> None:
        """Before the engine is there. Raises EngineFailed."""
        takes_s = self._rng.uniform(0.0, self.slowest_s)
        for share in (0.25, 0.5, 0.75, 1.0):
            await trio.sleep(takes_s / 4)
            progress("loading", share)
        if self._rng.random() < self.failing:
            raise EngineFailed("the disk cannot be read")


class SlowLoader(StageLoader):
    """The daemon's own loader on such a disk."""

    async def __call__(self, layers: LayerRange, generation: int, progress: Callable[[str, float], None]) -> Engine:
        disk = DISK.get()
        await disk.read(progress)
        engine = await super().__call__(layers, generation, progress)
        if disk.wrong and isinstance(engine, HashEngine):
            engine._stage._layer.reverse()
        return engine


DISK: ContextVar[Disk] = ContextVar("DISK")


class Device:
    """See the module. ``tell(name, event)`` gets what happens; ``crashed`` what a daemon ended with by itself."""

    def __init__(
        self, name: str, flags: list[str], *, home: Path, net: Net, processes: Processes, rng: Random, tell: Tell
    ) -> None:
        self.name = name
        self.home = home / name
        self.net, self.processes = net, processes
        self.daemon: Daemon | None = None
        self.crashed: BaseException | None = None
        self.since = 0.0  # of the last start, stop, freeze or thaw
        self.off = False
        self._flags = flags
        self._rng = rng
        self._tell = tell
        self.disk = Disk(rng)
        self._key = self._new_key()
        self._epoch = 0
        self._scope = trio.CancelScope()
        self._over = trio.Event()
        self._over.set()
        self._leave = trio.Event()
        self._told = False
        self._nursery: trio.Nursery | None = None

    @property
    def node_id(self) -> NodeId:
        return self._key.node_id

    @property
    def up(self) -> bool:
        """Its daemon runs, frozen or not."""
        return not self._over.is_set()

    @property
    def frozen(self) -> bool:
        return self.processes.frozen(self.name)

    @property
    def well(self) -> bool:
        return self.up and not self.frozen and not self._leave.is_set()

    @property
    def engine(self) -> Engine | None:
        return self.daemon.engine() if self.daemon is not None else None

    @property
    def layers(self) -> LayerRange | None:
        """What it can run now, as the device itself knows it."""
        return self.daemon.keeper.held.layers if self.daemon is not None else None

    def start(self, nursery: trio.Nursery) -> None:
        """Begin a run."""
        self.since, self.off = trio.current_time(), False
        self._epoch += 1
        self._scope, self._over, self._leave = trio.CancelScope(), trio.Event(), trio.Event()
        self._told = False
        identity = Identity(self._key, self._epoch, self._rng.randbytes(8))
        self.home.mkdir(parents=True, exist_ok=True)
        config = load([*self._flags, "--state-dir", str(self.home)], {})
        token = NODE.set(self.name)
        nursery.start_soon(self._live, config, identity, name=self.name)
        NODE.reset(token)

    async def _live(self, config: Config, identity: Identity) -> None:
        DISK.set(self.disk)
        udp, links = self.net.begin(self.name)
        web = Listener(Endpoint(self.net.address(self.name).host, 8090))
        sockets = Sockets(cast(Any, [web]), cast(Any, [links]), [cast(Any, udp)])
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self.daemon = Daemon(config, identity, None, sockets, self._nursery)
                    self.daemon.log.subscribe(lambda event: self._tell(self.name, event))
                    await self.daemon.run(cast(Any, SilentManager()))
                    self._nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - whatever ends a daemon is what the run must show
            self.crashed = error
        finally:
            self.daemon = None
            self.net.end(self.name)
            self._over.set()

    async def told_to_stop(self) -> None:
        """`meshd.daemon`'s wait for a signal."""
        if self._told:
            await trio.sleep_forever()  # a second signal never comes
        await self._leave.wait()  # it may have come before the daemon waited for it
        self._told = True

    async def run_in(self, work: Callable[[Daemon], Awaitable[None]]) -> None:
        """Work of the daemon's own for somebody outside (a request that came in). Ends with the daemon, if not before."""
        over, daemon = trio.Event(), self.daemon
        if daemon is None or self._nursery is None or self._leave.is_set():
            return  # nobody listens, or no more

        async def task() -> None:
            try:
                await work(daemon)
            finally:
                over.set()

        token = NODE.set(self.name)
        self._nursery.start_soon(task)
        NODE.reset(token)
        await over.wait()

    def leave(self) -> None:
        """SIGTERM."""
        self.since = trio.current_time()
        self._leave.set()

    async def gone(self) -> None:
        """Wait for the end of this run."""
        await self._over.wait()

    async def kill(self, *, power: bool = False) -> None:
        """SIGKILL, or no more power: nobody hears of that."""
        self.since, self.off = trio.current_time(), power
        self.net.off(self.name) if power else self.net.end(self.name)
        self.processes.thaw(self.name)
        self._scope.cancel()
        await self._over.wait()

    def freeze(self) -> None:
        self.since = trio.current_time()
        self.processes.freeze(self.name)

    def thaw(self) -> None:
        self.since = trio.current_time()
        self.processes.thaw(self.name)

    def wipe(self) -> None:
        """The device comes back as a stranger, with nothing."""
        shutil.rmtree(self.home, ignore_errors=True)
        self._key, self._epoch = self._new_key(), 0

    def _new_key(self) -> NodeKey:
        return NodeKey.of(Ed25519PrivateKey.from_private_bytes(self._rng.randbytes(32)))
