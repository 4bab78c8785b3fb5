"""What a seed does to a room: its devices, its faults, its clients, and how the room is judged at the end.

Three modes. *safety*: faults till the end, and only the laws count. *live*: the faults stop, everything is started, thawed and
mended, and within `SETTLE_S` the room must be whole, of one mind and answer everything. *calm*: once the room is whole, one
replica of every range is spared, and whoever asks one of the spared must be answered in time, whatever happens to the others.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final
from unittest import mock

import trio

from meshd.inference.hash_engine import HashEngine
from tests.sim.whole.asking import administer
from tests.sim.whole.net import Net, Weather
from tests.sim.whole.node import Device, SlowLoader
from tests.sim.whole.room import LAYER_MB, LAYERS, Errors, Room, ask, some_wish
from tests.sim.whole.world import NODE, Dice, Processes, clock, sealed

SETTLE_S: Final = 45.0
RECOVERY_S: Final = 9.0  # time for any recovery, beside what the answer itself takes
HALF_TRIPS: Final = 6  # of a token on a long route
TOLD_S: Final = 2.0  # a range that became ready is known to everybody and proven
STOPPED_S: Final = 30.0  # a drain takes ten seconds at most, and the stop after it not much
FORGET_S: Final = 70.0  # sessions that nobody ended are forgotten after a minute
MOVES: Final = 2  # a node's changes of range a minute
SMALL_MB: Final = (40, 60, 80, 110)


@dataclass
class Result:
    """What a run was. ``trace`` are its lines; ``broken`` the law that did not hold."""

    seed: int
    mode: str
    broken: str = ""
    simulated_s: float = 0.0
    settled_s: float = 0.0
    tally: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of a run. ``nodes`` None: the seed's choice; ``faults_s``: how long faults go on."""

    mode: str = "safety"
    nodes: int | None = None
    faults_s: float = 40.0
    watch_s: float = 60.0  # of a settled room, for moves


def run(seed: int, plan: Plan) -> Result:
    """One seed, from the first start to the verdict."""
    result = Result(seed, plan.mode)
    dice = Dice(seed)
    net = Net(dice.stream("net"))
    devices: dict[str, Device] = {}

    async def told_to_stop() -> None:
        await devices[NODE.get()].told_to_stop()

    with (
        tempfile.TemporaryDirectory(prefix="meshd-sim-", dir=_memory()) as home,
        sealed(seed, connect=net.connect, readable=net.readable, told_to_stop=told_to_stop),
        mock.patch("meshd.daemon.StageLoader", SlowLoader),
    ):
        script = Script(dice, net, Path(home), devices, plan)
        try:
            trio.run(script.main, clock=clock())
        finally:
            result.trace = list(script.room.trace)
            result.tally = dict(script.room.tally)
            result.settled_s = script.settled_s
            result.simulated_s = script.ended_at
            result.broken = script.room.broken
    return result


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class Script:
    """One seed's room and what befalls it."""

    def __init__(self, dice: Dice, net: Net, home: Path, devices: dict[str, Device], plan: Plan) -> None:
        self.rng = dice.stream("script")
        self.net, self.plan = net, plan
        self.processes = Processes()
        self.room = Room(dice, net, self.processes, home)
        self.room.devices = devices
        self.settled_s = self.ended_at = 0.0
        self._count = plan.nodes or self.rng.randint(5, 8)
        self._wishes = 0
        self._asking = True
        self._spared: list[Device] = []
        self._nursery: trio.Nursery | None = None

    async def main(self) -> None:
        """The run."""
        self.processes.install()
        errors = Errors(self.room)
        logging.getLogger("meshd").addHandler(errors)
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self.net.run)
                self._nursery.start_soon(self.room.watch)
                with self.room.over:
                    await self._play()
                self.ended_at = trio.current_time()
                for device in self.room.up:
                    await device.kill(power=True)
                self._nursery.cancel_scope.cancel()
        finally:
            logging.getLogger("meshd").removeHandler(errors)
        self.room.crashes()

    async def _play(self) -> None:
        await self._build()
        async with trio.open_nursery() as nursery:
            for client in range(self.rng.randint(1, 4)):
                nursery.start_soon(self._client, Random(f"{self.rng.random()} {client}"))
            await trio.sleep(self.rng.uniform(0.0, 12.0))
            if self.plan.mode == "calm":
                await self._settle()
                self._spare()
            await self._faults(trio.current_time() + self.plan.faults_s)
            if self.plan.mode == "live":
                await self._heal()
                await self._settle()
                self._asking = False
            nursery.cancel_scope.cancel()
        if self.plan.mode == "live":
            await self._prove()

    async def _build(self) -> None:
        """Devices that together hold every layer, once or several times; sometimes an entry without layers, or a pinned range."""
        rng = self.rng
        target, plenty = rng.choice([(1, 1.0), (2, 1.3), (2, 2.5), (2, 2.5), (3, 3.0)])
        capacities = [rng.choice(SMALL_MB) for _ in range(self._count)]
        if rng.random() < 0.3:
            capacities[rng.randrange(self._count)] = 220
        while sum(map(_layers_of, capacities)) < plenty * LAYERS:
            if min(capacities) >= max(SMALL_MB):
                capacities.append(max(SMALL_MB))
            else:
                capacities[capacities.index(min(capacities))] = max(SMALL_MB)
        if rng.random() < 0.3:
            capacities.append(0)
        spare = sum(map(_layers_of, capacities)) - LAYERS
        slowly, liar = rng.random() < 0.5, len(capacities) if rng.random() < 0.2 else None
        if liar is not None:
            capacities.append(rng.choice(SMALL_MB))
        for number, capacity in enumerate(capacities):
            flags = ["--target-replicas", str(target)]
            # The others must be enough for everything: who is pinned does not go where it is needed.
            if capacity == max(SMALL_MB) and rng.random() < 0.1 and spare >= _layers_of(capacity):
                spare -= _layers_of(capacity)
                start = rng.randrange(LAYERS // 2)
                flags += ["--layers", f"{start}..{start + 6}"]
            if number == liar:
                flags += ["--no-admit"]  # or it would find out itself
            device = self.room.add(f"n{number + 1}", capacity, *flags)
            device.disk.wrong = number == liar
            self.room.note(
                device.name, f"has {capacity} MB {' '.join(flags)}{' and computes wrongly' if number == liar else ''}"
            )
        for device in self.room.devices.values():
            await trio.sleep(rng.uniform(0.0, 3.0) if slowly else 0.0)
            if not device.up:
                self._start(device)

    def _start(self, device: Device) -> None:
        assert self._nursery is not None
        self.room.note(device.name, "starts")
        device.start(self._nursery)

    # --- clients ------------------------------------------------------------------------------------------------------

    async def _client(self, rng: Random) -> None:
        while self._asking:
            await trio.sleep(rng.expovariate(0.7))
            if not self.room.up:
                continue
            self._wishes += 1
            wish = some_wish(self._wishes, rng)
            for _ in range(4):
                entries = self._spared or self.room.honest
                if wish.final is not None or not entries or not self._asking:
                    break
                must = self._spared_hold_all()
                attempt = await ask(self.room, wish, rng.choice(entries))
                enough = wish.deadline_s - self._undisturbed_s(wish.max_tokens) >= RECOVERY_S
                if must and enough and wish.final is None and self._spared_hold_all():
                    self.room.fail(
                        f"wish {wish.number} at {attempt.entry.name} beside whole layers: {attempt.error} {attempt.message}"
                    )
                await trio.sleep(0.05)

    def _undisturbed_s(self, tokens: int) -> float:
        """What an answer takes at most in this weather if nothing happens."""
        weather = self.net.weather
        return tokens * HALF_TRIPS * (weather.latency_s + weather.jitter_s)

    def _spare(self) -> None:
        """One replica of every layer, and an entry."""
        start = 0
        while start < LAYERS:
            holders = [d for d in self.room.honest if d.layers is not None and d.layers.start <= start < d.layers.end]
            best = max(holders, key=lambda d: d.layers.end if d.layers is not None else 0)
            self._spared.append(best)
            start = best.layers.end if best.layers is not None else LAYERS
        self.room.note("all", f"{[d.name for d in self._spared]} are spared")

    def _spared_hold_all(self) -> bool:
        """They may still move by themselves."""
        held = [d.layers for d in self._spared if d.layers is not None]
        return bool(held) and all(any(h.start <= i < h.end for h in held) for i in range(LAYERS))

    # --- faults -------------------------------------------------------------------------------------------------------

    async def _faults(self, until: float) -> None:
        kinds: dict[Callable[[], Awaitable[None]], float] = {
            self._kill: 5,
            self._power_off: 2,
            self._start_one: 8,
            self._freeze: 4,
            self._thaw: 6,
            self._cut_one_way: 3,
            self._partition: 2,
            self._mend: 6,
            self._weather: 2,
            self._wipe: 1,
            self._leave: 2,
            self._drain: 1,
            self._break_engine: 1,
            self._evict: 2,
        }
        tempo = self.rng.choice([0.3, 1.0, 1.0, 2.0])
        while trio.current_time() < until:
            await trio.sleep(tempo * self.rng.choice([0.0, 0.1, 0.5, 1.0, 3.0, 6.0]))
            self.room.crashes()
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            self.room.tally["faults"] += 1
            await kind()

    def _some(self, devices: list[Device]) -> Device | None:
        devices = [device for device in devices if device not in self._spared]
        return self.rng.choice(devices) if devices else None

    async def _kill(self) -> None:
        if (device := self._some(self.room.up)) is not None:
            self.room.note(device.name, "is killed")
            self.room.lost(device)
            await device.kill()

    async def _power_off(self) -> None:
        if (device := self._some(self.room.up)) is not None:
            self.room.note(device.name, "loses its power")
            self.room.lost(device)
            await device.kill(power=True)

    async def _start_one(self) -> None:
        if (device := self._some([d for d in self.room.devices.values() if not d.up])) is not None:
            self._start(device)

    async def _wipe(self) -> None:
        if (device := self._some([d for d in self.room.devices.values() if not d.up])) is not None:
            self.room.note(device.name, "is wiped")
            device.wipe()
            self._start(device)

    async def _freeze(self) -> None:
        if (device := self._some([d for d in self.room.up if not d.frozen])) is not None:
            self.room.note(device.name, "freezes")
            device.freeze()

    async def _thaw(self) -> None:
        if (device := self._some([d for d in self.room.up if d.frozen])) is not None:
            self.room.note(device.name, "thaws")
            device.thaw()

    async def _cut_one_way(self) -> None:
        source, to = self.rng.sample(list(self.room.devices), 2)
        if {source, to} <= self._spared_names():
            return
        self.room.note("net", f"{source} -> {to} is cut")
        self.net.cut(source, to)

    async def _partition(self) -> None:
        names = list(self.room.devices)
        apart = set(self.rng.sample(names, self.rng.choice([1, 1, len(names) // 2]))) - self._spared_names()
        self.room.note("net", f"{sorted(apart)} are apart")
        for a in apart:
            for b in names:
                if b not in apart:
                    self.net.cut(a, b)
                    self.net.cut(b, a)

    def _spared_names(self) -> set[str]:
        return {device.name for device in self._spared}

    async def _mend(self) -> None:
        self.room.note("net", "is mended")
        self.net.mend()

    async def _weather(self) -> None:
        self.net.weather = Weather(
            latency_s=self.rng.choice([0.0005, 0.002, 0.02]),
            jitter_s=self.rng.choice([0.0, 0.002, 0.05]),
            loss=self.rng.choice([0.0, 0.0, 0.05, 0.02 if self._spared else 0.2]),
            double=self.rng.choice([0.0, 0.05]),
        )
        self.room.note("net", f"{self.net.weather}")

    async def _leave(self) -> None:
        if (device := self._some(self.room.well)) is not None:
            self.room.note(device.name, "is told to stop")
            self.room.lost(device)
            device.leave()

    async def _drain(self) -> None:
        device = self._some(self.room.well)
        if device is not None and device.daemon is not None:
            draining = device.daemon.draining.reason
            self.room.note(device.name, "resumes" if draining else "drains")
            await administer(device, "resume" if draining else "drain")

    async def _break_engine(self) -> None:
        device = self._some(self.room.well)
        if device is not None and device.engine is not None:
            self.room.note(device.name, "loses its engine")
            self.room.lost(device)
            device.since = trio.current_time()
            await device.engine.aclose()

    async def _evict(self) -> None:
        device = self._some(self.room.well)
        engine = device.engine if device is not None else None
        if isinstance(engine, HashEngine):
            states = engine._sessions.keys()
            for session, layers in states:
                engine.evict(session, layers)

    # --- the end of a live run ----------------------------------------------------------------------------------------

    async def _heal(self) -> None:
        self.room.note("all", "is healed")
        self.net.mend()
        self.net.weather = Weather()
        for device in self.room.devices.values():
            device.disk.failing = 0.0
            device.thaw()
            if device.up and not device.well:
                with trio.move_on_after(STOPPED_S):
                    await device.gone()
            if device.up and not device.well:
                self.room.fail(f"{device.name} was told to stop and still runs {STOPPED_S:.0f} s later")
            if not device.up:
                self._start(device)
            elif device.daemon is not None and device.daemon.draining.reason:
                await administer(device, "resume")

    async def _settle(self) -> None:
        began = trio.current_time()
        while unrest := self.room.unrest():
            self.room.crashes()
            if trio.current_time() - began > SETTLE_S:
                self.room.fail(f"not settled {SETTLE_S:.0f} s after the last fault: {unrest}")
            await trio.sleep(0.5)
        self.settled_s = trio.current_time() - began
        self.room.note("all", f"is settled after {self.settled_s:.1f} s")

    async def _prove(self) -> None:
        """Every entry answers, nobody moves without end, and nothing is left behind."""
        settled = trio.current_time()
        for device in self.room.honest:
            self._wishes += 1
            wish = some_wish(self._wishes, self.rng)
            attempt = await ask(self.room, wish, device)
            if wish.final is None:
                self.room.fail(
                    f"wish {wish.number} at {device.name} in a settled room: {attempt.error} {attempt.message}"
                )
        while trio.current_time() < settled + self.plan.watch_s:
            await trio.sleep(1.0)
            self.room.crashes()
            moved = [name for at, name in self.room.took if at > trio.current_time() - 60.0 and at > settled]
            for name in set(moved):
                if moved.count(name) > MOVES:
                    self.room.fail(f"{name} changed its range {moved.count(name)} times within a minute")
        while (left := self.room.leftovers()) and trio.current_time() < settled + FORGET_S:
            await trio.sleep(1.0)
        if left:
            self.room.fail(left)
        over = trio.current_time()
        while (unrest := self.room.unrest()) and trio.current_time() < over + TOLD_S:
            await trio.sleep(0.25)  # what was loaded in peace may have become ready this very moment
        if unrest:
            self.room.fail(f"settled, and then: {unrest}")


def _layers_of(capacity_mb: int) -> int:
    """How many layers fit, with room for sessions."""
    return int(0.8 * capacity_mb) // LAYER_MB
