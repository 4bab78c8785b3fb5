"""A simulated room: devices, clients under way, and the laws that hold in it whatever happens.

Owns the list of devices and the trace; knows the truth of every device, which no node does. A broken law ends the
run and is said in ``broken``.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import trio

from meshd.election.coverage import counts
from meshd.vocabulary import LayerRange, NodeStatus
from tests.sim.whole.asking import HONEST, Attempt, Wish
from tests.sim.whole.net import Net
from tests.sim.whole.node import Device
from tests.sim.whole.world import Dice, Processes

LAYERS: Final = 12
LAYER_MB: Final = 10
MODEL: Final = f"hash:{LAYERS},layer_mb={LAYER_MB},step_ms=12"
WHOLE: Final = LayerRange(0, LAYERS)
HOLD_S: Final = 60.0  # a promise to stay outlives nobody: who promised may have died since
DISHONEST: Final = ("unproven", "bad_rows", "quarantine", "refuse", "overclaim", "conflict")  # all of them are honest
KNOWN_S: Final = 15.0  # who has been there undisturbed for so long is known, proven and forgiven everywhere
MILD: Final = 0.05  # loss under which nobody is taken for dead
OVERDUE_S: Final = 1.0


class Room:
    """See the module."""

    def __init__(self, dice: Dice, net: Net, processes: Processes, home: Path) -> None:
        self.net, self.processes = net, processes
        self.devices: dict[str, Device] = {}
        self.trace: deque[str] = deque(maxlen=20_000)
        self.tally: Counter[str] = Counter()
        self.broken = ""
        self.took: list[tuple[float, str]] = []  # when a node began to take a range, and which
        self._dice, self._home = dice, home
        self._steady: dict[str, tuple[object, float]] = {}  # what a device is like, since when
        self._died: list[tuple[float, LayerRange]] = []
        self.over = trio.CancelScope()

    # --- who is there -------------------------------------------------------------------------------------------------

    def add(self, name: str, capacity_mb: int, *flags: str) -> Device:
        address = self.net.address(name)
        joins = [str(self.net.address(other)) for other in list(self.devices)[:2]]
        device = self.devices[name] = Device(
            name,
            [
                *("--name", name, "--model", MODEL, "--capacity-mb", str(capacity_mb), "--mesh", str(address)),
                *("--http", f"{address.host}:8090", "--insecure-lan", "--no-mdns", "--log-level", "error"),
                *("--route-seed", str(self._dice.stream(f"routes {name}").getrandbits(31))),
                *(("--join", ",".join(joins)) if joins else ()),
                *flags,
            ],
            home=self._home,
            net=self.net,
            processes=self.processes,
            rng=self._dice.stream(f"device {name}"),
            tell=self.tell,
        )
        return device

    @property
    def up(self) -> list[Device]:
        return [device for device in self.devices.values() if device.up]

    @property
    def well(self) -> list[Device]:
        return [device for device in self.devices.values() if device.well]

    @property
    def honest(self) -> list[Device]:
        """Who is up and computes as it should."""
        return [device for device in self.up if not device.disk.wrong]

    def named(self, node_id: str) -> str:
        return next((d.name for d in self.devices.values() if d.node_id == node_id), node_id[:8])

    # --- what happens -------------------------------------------------------------------------------------------------

    def note(self, who: str, what: str) -> None:
        """One line of the trace."""
        self.trace.append(f"{trio.current_time():9.3f} {who:4} {what}")

    def tell(self, name: str, fields: Mapping[str, Any]) -> None:
        """An event of a daemon's log."""
        ev = fields["ev"]
        if ev == "answer":
            return
        if ev == "stage":
            self._stage(name, fields)
        if ev in DISHONEST and not self._wrong(fields):
            self.fail(f"{name}: {ev} {self._short(fields)}")
        about = f" {self.named(fields['node'])}" if fields.get("node") not in (None, self.devices[name].node_id) else ""
        rest = fields.get("text") or " ".join(
            f"{key}={self._short(value)}"
            for key, value in fields.items()
            if key not in ("ev", "node", "name", "t", "level", "signature")
        )
        self.note(name, f"{ev}{about} {rest}")

    def _wrong(self, fields: Mapping[str, Any]) -> bool:
        """Whether an event is about a device that does compute wrongly."""
        about = (fields["node"], fields.get("peer"))
        return any(device.disk.wrong and device.node_id in about for device in self.devices.values())

    def _short(self, value: Any) -> str:
        text = str(value)
        for device in self.devices.values():
            text = text.replace(device.node_id, device.name)
        return text

    def fail(self, law: str) -> None:
        """A law is broken: the run ends."""
        if not self.broken:
            self.broken = f"at {trio.current_time():.3f} s: {law}"
            self.note("LAW", law)
            self.over.cancel()

    def lost(self, device: Device) -> None:
        """A device is about to die with what it holds."""
        if device.layers is not None:
            self._died.append((trio.current_time(), device.layers))

    # --- laws ---------------------------------------------------------------------------------------------------------

    def _stage(self, name: str, fields: Mapping[str, Any]) -> None:
        if fields["why"] != "drop":
            self.took.append((trio.current_time(), name))
            return
        device, layers = self.devices[name], LayerRange(*fields["layers"])
        if device.layers != layers or device.disk.wrong:
            return  # it never served them: what was loaded beside is given up
        beside = device.daemon.keeper._beside if device.daemon else None
        kept = beside.info.layers if beside is not None else None
        now = trio.current_time()
        others = [d.layers for d in self.honest if d is not device and d.layers is not None]
        others += [held for at, held in self._died if now - at < HOLD_S]
        if kept is not None:
            others.append(kept)
        missing = [i for i in _unheld(others) if layers.start <= i < layers.end]
        # A room that has a gap already may give up what it needs to fill it: it cannot answer anyway. So may the part of a
        # divided room that the device sees.
        if missing and not self.gaps() and not _sees_gap(device):
            self.fail(f"{name} drops {layers} though nobody else holds {missing}")

    def gaps(self) -> list[int]:
        """Layers that nobody can run now; who hangs is as good as dead to the others."""
        return _unheld([device.layers for device in self.honest if device.well and device.layers is not None])

    async def watch(self) -> None:
        """Notice who is undisturbed, until cancelled."""
        while True:
            for device in self.devices.values():
                state = self._state(device)
                if state is None or self._steady.get(device.name, (None, 0.0))[0] != state:
                    self._steady[device.name] = (state, trio.current_time())
            await trio.sleep(0.5)

    def _state(self, device: Device) -> object:
        """What stays the same for as long as a device is undisturbed and does the same; None while it is disturbed, or drains
        and so takes nothing that another could."""
        daemon, mild = device.daemon, self.net.weather.loss <= MILD
        if daemon is None or daemon.draining.reason or not mild or not device.well or self.net.touched(device.name):
            return None
        if device.engine is None:
            return device.since
        return (device.since, device.layers, device.engine.info.generation)

    def _steady_s(self, device: Device) -> float:
        """For how long it has been as it is now."""
        state, since = self._steady.get(device.name, (None, math.inf))
        return trio.current_time() - max(since, device.since) if state == self._state(device) else 0.0

    def _denied(self, attempt: Attempt) -> str:
        """Who holds, undisturbed for long, what an undisturbed entry says that nobody holds."""
        if attempt.error != "stage_unavailable" or self._steady_s(attempt.entry) < KNOWN_S:
            return ""
        for start, end in attempt.missing:
            for device in self.honest:
                held = device.layers
                if held is not None and held.start <= start and end <= held.end and self._steady_s(device) >= KNOWN_S:
                    return f"{device.name} has held {held} for {self._steady_s(device):.1f} s"
        return ""

    def judge(self, attempt: Attempt) -> None:
        """After an entry's try."""
        now, wish = trio.current_time(), attempt.wish
        if attempt.wrong:
            self.fail(f"wish {wish.number} at {attempt.entry.name}: {attempt.wrong}")
        late = now - attempt.began - wish.deadline_s
        if late > OVERDUE_S and attempt.entry.since < attempt.began and attempt.entry.well:
            self.fail(f"wish {wish.number} at {attempt.entry.name}: {late:.1f} s past its deadline")
        if attempt.error and attempt.error not in HONEST:
            self.fail(f"wish {wish.number} at {attempt.entry.name}: {attempt.error}: {attempt.message}")
        if denied := self._denied(attempt):
            self.fail(f"wish {wish.number} at {attempt.entry.name}: {attempt.message}, but {denied}")
        if wish.final is not None and (wish.got != wish.want or wish.final["finish_reason"] != "length"):
            self.fail(f"wish {wish.number} ended as {wish.final} with {wish.got}, wanted {wish.want}")
        if attempt.ended and not attempt.error and wish.final is None:
            self.fail(f"wish {wish.number} at {attempt.entry.name} ended without an end")

    def crashes(self) -> None:
        """A daemon that ended by itself."""
        for device in self.devices.values():
            if device.crashed is not None:
                crash = "".join(traceback.format_exception(device.crashed))
                self.fail(f"{device.name} crashed:\n{crash}")

    # --- what a quiet room is -----------------------------------------------------------------------------------------

    def unrest(self) -> str:
        """What is not yet as it must be once nothing is wrong any more; empty when all is well."""
        for device in self.devices.values():
            if device.daemon is None:
                return f"{device.name} is down"
            if device.engine is not None and not device.engine.health().alive:
                return f"{device.name} has not noticed yet that its engine is dead"
            members = device.daemon.directory().members
            for other in self.devices.values():
                member = members.get(other.node_id)
                if member is None or member.state is not NodeStatus.ALIVE:
                    return f"{device.name} sees {other.name} as {member.state.value if member else 'nobody'}"
                if other.layers is not None and member.advert.layers != other.layers:
                    return f"{device.name} sees {other.name} with {member.advert.layers}, it has {other.layers}"
                if device.disk.wrong or other.layers is None:
                    continue
                if other.disk.wrong and member.admitted:
                    self.fail(f"{device.name} has admitted {other.name}, which computes wrongly")
                elif not other.disk.wrong and not member.admitted:
                    return f"{device.name} has not admitted {other.name}: {member.admission}"
        gaps = self.gaps()
        return f"nobody holds {gaps}" if gaps else ""

    def leftovers(self) -> str:
        """What still runs though nobody asks; empty when nothing does."""
        for device in self.devices.values():
            daemon = device.daemon
            if daemon is None:
                continue
            for what, count in (
                ("requests", daemon.app.in_flight),
                ("answers", daemon.chain.in_flight),
                ("sessions", daemon.chain.sessions),
                ("chain streams", daemon.chain.streams),
            ):
                if count:
                    return f"{device.name} still has {count} {what}"
        return ""


def _sees_gap(device: Device) -> bool:
    """Whether nobody holds some layer, as far as this device knows."""
    assert device.daemon is not None
    assert device.layers is not None
    others = [m for id_, m in device.daemon.directory().members.items() if id_ != device.node_id]
    held = [m.advert.layers for m in others if m.state is NodeStatus.ALIVE and m.advert.layers is not None]
    return bool(_unheld([*held, device.layers]))


def _unheld(ranges: Sequence[LayerRange]) -> list[int]:
    """Layers that none of the ranges holds."""
    return [layer for layer, replicas in enumerate(counts(ranges, LAYERS)) if not replicas]


class Errors(logging.Handler):
    """A daemon that logs an error has met what nobody expected."""

    def __init__(self, room: Room) -> None:
        super().__init__(logging.ERROR)
        self._room = room

    def emit(self, record: logging.LogRecord) -> None:
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        self._room.fail(f"logged: {record.getMessage()}\n{trace}")


async def ask(room: Room, wish: Wish, entry: Device) -> Attempt:
    """One try at one entry, judged."""
    attempt = Attempt(wish, entry, trio.current_time(), trio.current_time())
    room.note("wish", f"{wish.number} asks {entry.name} for {wish.max_tokens - len(wish.got)} of {wish.max_tokens}")
    await attempt.run()
    room.judge(attempt)
    outcome = "answered" if wish.final is not None else attempt.error or "left alone"
    room.tally[outcome] += 1
    room.note("wish", f"{wish.number} at {entry.name}: {outcome} ({len(wish.got)} tokens) {attempt.message}")
    return attempt


def some_wish(number: int, rng: Random) -> Wish:
    """Short and long prompts, some with a common beginning, some sampled, some stateless."""
    begin = rng.choice(["", "", "The lighthouse keeper said to the sea, that night and every other night: "])
    prompt = begin + "".join(rng.choice("abcdefgh ") for _ in range(rng.choice([1, 8, 20])))
    return Wish(
        number,
        prompt,
        rng.choice([1, 4, 12, 24]),
        LAYERS,
        deadline_s=rng.choice([4.0, 10.0, 20.0]),
        temperature=rng.choice([0.0, 0.0, 0.7]),
        stateless=rng.random() < 0.1,
    )
