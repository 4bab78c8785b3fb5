"""`mass-equip`: from a machine that answers to SSH to a node that serves; a second run changes nothing.

Each step looks before it changes, so a run that was interrupted goes on where it stopped. All devices are installed at the same
time. Then the first one seeds the room, and the others are started one after another, each once the one before has claimed its
place: two devices that ask the election at the same moment would be sent to the same range.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshd.errors import LocalError
from meshd.fleet import rolling, settings
from meshd.fleet.clones import Disk, clones, moved
from meshd.fleet.device.facts import key_hash
from meshd.fleet.hosts import Device, settings_of
from meshd.fleet.ledger import Entry, Ledger
from meshd.fleet.preparations import Preparation, preparations
from meshd.fleet.ssh import DeviceFailed
from meshd.fleet.wheels import Cargo
from meshd.fleet.work import Fleet, Worker, came_up, has_place, tell, until

DISK_MB = {True: 4000, False: 400}  # torch and transformers with their wheels beside; meshd alone
ENGINE_ARCHS = ("x86_64", "amd64", "aarch64", "arm64")  # which torch has wheels for
ENGINE_RAM_MB = 900
SETTLE_S = 20.0  # for a started device to claim its place before the next one asks


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for, for all devices. ``engine``: None decides from model and machine."""

    model: str | None = None
    flags: tuple[str, ...] = ()
    engine: bool | None = None
    offline: bool = False
    system_site_packages: bool = False
    dry_run: bool = False
    accept_gap: bool = False


@dataclass(slots=True)
class Plan:
    """What is known of one device before anything is changed."""

    facts: dict[str, Any]
    preparations: list[dict[str, str]]
    renew: str = ""  # whose identity it holds
    stamp: str = ""
    engine: bool = False
    text: str = ""  # of meshd.toml
    dirty: bool = False  # a running daemon does not know of a change yet


@dataclass(slots=True)
class Room:
    """What the devices that run tell those that follow."""

    seeds: list[str] = field(default_factory=list)  # mesh addresses
    http: str = ""
    digest: str = ""
    held: list[list[int]] = field(default_factory=list)
    handed_out: int = 0

    def learn(self, seen: dict[str, Any]) -> None:
        """From what a device's own daemon says."""
        me = seen.get("self")
        if not me or not me["mesh"]:
            return
        if me["mesh"] not in self.seeds:
            self.seeds.append(me["mesh"])
        self.digest = seen["hive"]["digest"] or self.digest
        self.held += [me["layers"]] if me["layers"] else []
        host = me["mesh"].rpartition(":")[0]  # it may listen on 0.0.0.0; where it is reached is in its advert
        self.http = self.http or f"http://{host}:{str(me['http']).rpartition(':')[2]}"

    def in_turn(self) -> list[int] | None:
        """The next of the ranges that others hold, for a device that cannot ask."""
        if not self.held:
            return None
        self.handed_out += 1
        return self.held[(self.handed_out - 1) % len(self.held)]


class Equipping:
    """One run over a fleet. ``guides``: devices of the same room that are not to be changed, to ask about it."""

    def __init__(self, fleet: Fleet, guides: Sequence[Worker], wish: Wish, cargo: Cargo, place: Path) -> None:
        self.fleet, self.guides, self.wish, self.cargo, self.place = fleet, guides, wish, cargo, place
        self.plans: dict[Device, Plan] = {}
        self.room = Room()
        self._turn = threading.Lock()
        self._packing = threading.Lock()

    def run(self) -> None:
        """Raises nothing for a device: its outcome says what happened. LocalError: there is nothing to make a room of."""
        self.fleet.each(self._look_at)
        self._find_clones()
        self.fleet.each(self._meet)
        for guide in self.guides:
            if len(self.room.seeds) < settings.MAX_SEEDS:
                self._meet_guide(guide)
        self._refuse_a_room_without_model()
        self.fleet.each(self._judge)
        if self.wish.dry_run:
            self.fleet.each(self._say)
            return
        self.fleet.each(self._install)
        waiting = self.fleet.well
        while waiting and not self.room.seeds:
            self.fleet.each(self._join, [waiting.pop(0)])
        self.fleet.each(self._join, waiting)

    # --- before anything is changed -----------------------------------------------------------------------------------

    def _preparations(self, device: Device) -> list[Preparation]:
        ports = settings.ports_of(settings_of([*self.wish.flags, *device.flags], str(device)))
        return preparations(*ports)

    def _look_at(self, worker: Worker) -> None:
        worker.doing("looking")
        answer = worker.ask("facts", preparations=[step.json() for step in self._preparations(worker.device)])
        facts = answer["facts"]
        self.plans[worker.device] = Plan(facts, answer["preparations"], dirty=facts["untold"])

    def _find_clones(self) -> None:
        ledger, well = self.fleet.ledger, {worker.device: worker for worker in self.fleet.well}
        found = {device: _disk(self.plans[device].facts) for device in well}
        for device, owner in clones(found, ledger.entries).items():
            self.plans[device].renew = owner
        for device, before in moved(found, ledger.entries).items():
            if before in well:
                well[device].progress.failed(well[device].outcome, f"this is {before} under another name; name it once")
                continue
            well[device].outcome.warnings.append(f"this is {before} under another name or address")
            if not self.wish.dry_run:
                entry = dataclasses.replace(ledger.entry(before), device=device)
                ledger.forget(before)
                ledger.put(entry)

    def _meet(self, worker: Worker) -> None:
        """A device that serves already tells of its room."""
        plan = self.plans[worker.device]
        if plan.facts["running"] is None or plan.renew:
            return
        seen = worker.ask("look")
        if "status" in seen:
            tell(worker, seen, plan.facts)
            with self._turn:
                self.room.learn(seen)

    def _meet_guide(self, guide: Worker) -> None:
        try:
            seen = guide.ask("look")
        except DeviceFailed:
            return  # it is not part of this command; another may answer
        if "status" in seen:
            guide.outcome.facts["node_id"] = seen["status"]["node_id"]
            self.room.learn(seen)

    def _refuse_a_room_without_model(self) -> None:
        """Nobody would ever serve, and every device would be waited for."""
        named = self.wish.model or any('\nmodel = "' in plan.facts["config"] for plan in self.plans.values())
        if self.plans and not named and not self.room.seeds:
            raise LocalError("nobody runs yet, so the room needs a model: say --model smollm2-135m, for example")

    def _judge(self, worker: Worker) -> None:
        """Whether the device can be a node at all, and what it is to become."""
        plan = self.plans[worker.device]
        facts = plan.facts
        worker.outcome.facts |= {"service": facts["service"], "privilege": facts["privilege"]}
        plan.engine = engine_fits(self.wish, facts)
        plan.stamp = self.cargo.stamp(engine=plan.engine, system_site_packages=self.wish.system_site_packages)
        if facts["stamp"] != plan.stamp and facts["disk_free_mb"] < DISK_MB[plan.engine]:
            raise DeviceFailed(f"{facts['disk_free_mb']} MB of disk are free, {DISK_MB[plan.engine]} are needed")
        plan.text = self._settings(worker.device, facts["config"])
        if facts["boot_warning"]:
            worker.outcome.warnings.append(facts["boot_warning"])
        worker.outcome.warnings += [step["text"] for step in plan.preparations if step["state"] == "warn"]

    def _settings(self, device: Device, before: str) -> str:
        wanted = settings.settings(
            device, model=self.wish.model, flags=self.wish.flags, seeds=self.room.seeds, before=before
        )
        return settings.text_of(wanted)

    def _say(self, worker: Worker) -> None:
        """--dry-run: what the rest of this class would do."""
        plan = self.plans[worker.device]
        facts, key = plan.facts, self.fleet.ledger.key
        changes = [step["text"] for step in plan.preparations if step["state"] == "todo"]
        if facts["stamp"] != plan.stamp:
            changes.append(f"install meshd {plan.stamp}{'' if plan.engine else ' without torch'}")
        if not facts["key"] or (key and facts["key"] != key_hash("\n".join(key))):
            changes.append("replace the mesh key" if facts["key"] else "write the mesh key")
        if plan.renew:
            changes.append(f"give it an identity of its own (it has that of {plan.renew})")
        if facts["config"] != plan.text:
            changes.append(f"write meshd.toml: {', '.join(plan.text.splitlines()[1:]) or 'no settings'}")
        if not facts["installed"]:
            changes.append(f"install the boot service ({facts['service']}, as {facts['privilege']})")
        if changes or facts["untold"] or facts["running"] is None:
            changes.append("restart meshd" if facts["running"] else "start meshd")
        worker.outcome.changes += changes

    # --- changing -----------------------------------------------------------------------------------------------------

    def _install(self, worker: Worker) -> None:
        plan = self.plans[worker.device]
        steps = {step.name: step for step in self._preparations(worker.device)}
        for found in plan.preparations:
            if found["state"] == "todo":
                worker.doing(found["text"])
                worker.ask("prepare", preparation=steps[found["name"]].json(), timeout_s=900)
                worker.did(found["text"])
        if plan.facts["stamp"] == plan.stamp:
            return
        with self._packing:
            payload = self.cargo.pack(plan.facts["arch"], self.place)
        about = build(worker, self.cargo, plan.stamp, payload, self.wish, engine=plan.engine)
        worker.ask("switch", stamp=plan.stamp)
        worker.did(f"installed meshd {about['version']}{'' if about['engine'] else ' without torch'}")
        if about["warning"]:
            worker.outcome.warnings.append(about["warning"])
        plan.dirty = True

    def _join(self, worker: Worker) -> None:
        plan = self.plans[worker.device]
        self._give_key(worker, plan)
        if plan.renew:
            answer = worker.ask("identity", renew=True)
            worker.did(f"new identity {answer['node_id'][:8]}: it had that of {plan.renew}")
            plan.dirty = True
        self._give_settings(worker, plan)
        if not plan.facts["installed"]:
            worker.did(f"boot service: {worker.ask('install_service')['service']}, as {plan.facts['privilege']}")
            plan.dirty = True
        seen = self._bring_up(worker, plan)
        tell(worker, seen, plan.facts)
        with self._turn:
            self.room.learn(seen)
            remember(self.fleet.ledger, worker)
        layers = seen["status"]["layers"]
        worker.doing(f"serves {'..'.join(map(str, layers)) if layers else 'no layers'}")

    def _give_key(self, worker: Worker, plan: Plan) -> None:
        """The ledger's ring, else the device's own, else a new one; whoever comes first decides for all."""
        ledger = self.fleet.ledger
        with self._turn:
            if not ledger.key:
                ledger.set_key(worker.ask("get_key" if plan.facts["key"] else "new_key")["lines"])
        if plan.facts["key"] == key_hash("\n".join(ledger.key)):
            return
        worker.ask("set_key", lines=ledger.key, name=False)
        worker.did("replaced the mesh key" if plan.facts["key"] else "wrote the mesh key")
        plan.dirty = True

    def _give_settings(self, worker: Worker, plan: Plan) -> None:
        if not plan.facts["config"]:
            plan.text = self._settings(worker.device, "")  # whom to join: those that run by now
        if plan.facts["config"] != plan.text:
            worker.ask("set_config", text=plan.text)
            worker.did("wrote meshd.toml")
            plan.dirty = True

    def _bring_up(self, worker: Worker, plan: Plan) -> dict[str, Any]:
        """What it says of itself once it serves and another node has admitted it."""
        version, others = self.cargo.version, [*self.fleet.workers, *self.guides]
        before = None
        if plan.facts["running"] is not None and not plan.renew and plan.dirty:
            with self._turn:  # it serves: one at a time, as an upgrade
                seen = rolling.restart(worker, self.fleet, version=version, accept_gap=self.wish.accept_gap)
            worker.did("restarted")
            return seen
        if plan.facts["running"] is None or plan.renew:
            with self._turn:  # one at a time finds its place
                self._suggest_range(worker, plan)
                worker.doing("starting")
                before = worker.ask("restart")["before"]
                worker.did("started")
                self._wait_for_claim(worker)
        worker.doing("waiting until it serves")
        seen = came_up(worker, version=version, before=before, wait_s=self.fleet.wait_s)
        rolling.wait_until_admitted(worker, others, seen, self.fleet.wait_s)
        return seen

    def _suggest_range(self, worker: Worker, plan: Plan) -> None:
        """Where a new device starts: what the live room's election says, else in turn what others hold.

        It is written as the range that the device held last, so the device stays free to move when the room needs it elsewhere.
        """
        held_before = plan.facts["range"] and not plan.renew
        if held_before or worker.device.layers not in (None, "auto") or not self.room.http or not self.room.digest:
            return
        try:
            layers = worker.ask("elect", seed=self.room.http, capacity_mb=worker.device.capacity_mb)["layers"]
        except DeviceFailed as failed:
            if "too small" in str(failed):
                worker.outcome.warnings.append(f"an entry without layers: {failed}")
                return
            layers = self.room.in_turn()
            if layers is None:
                return  # the daemon elects for itself
            worker.outcome.warnings.append(f"the room could not be asked ({failed}); took a range in turn")
        worker.ask("set_range", digest=self.room.digest, layers=layers)

    def _wait_for_claim(self, worker: Worker) -> None:
        """The next election must count this one. A device that takes longer (a download) has been long enough in the way."""

        def settled() -> bool:
            seen = worker.ask("look")
            me = seen.get("self") or {}
            return bool(me) and bool(me["layers"] or me["loading"] or has_place(seen["status"]))

        try:
            until(settled, min(SETTLE_S, self.fleet.wait_s), lambda: "no claim")
        except DeviceFailed:
            return


def _disk(facts: dict[str, Any]) -> Disk:
    return Disk(facts["identity"], tuple(facts["macs"]))


def engine_fits(wish: Wish, facts: dict[str, Any]) -> bool:
    """Whether torch is to be installed: asked for, or of use and possible. The rehearsal model needs none."""
    if wish.engine is not None:
        return wish.engine
    rehearsal = (wish.model or "").startswith("hash:") or (wish.model is None and 'model = "hash:' in facts["config"])
    return facts["arch"] in ENGINE_ARCHS and facts["ram_mb"] >= ENGINE_RAM_MB and not facts["termux"] and not rehearsal


def build(worker: Worker, cargo: Cargo, stamp: str, payload: Path, wish: Wish, *, engine: bool) -> dict[str, Any]:
    """Have the environment made; changes nothing that runs."""
    worker.doing(f"installing meshd {cargo.version}{' and torch (a few minutes)' if engine else ''}")
    return worker.ask(
        "build",
        payload=payload,
        timeout_s=3900,
        stamp=stamp,
        wheel=cargo.own.name,
        engine=engine,
        offline=wish.offline,
        system_site_packages=wish.system_site_packages,
    )


def remember(ledger: Ledger, worker: Worker) -> None:
    """Note a device that serves."""
    facts = worker.outcome.facts
    disk = _disk(worker.ask("facts", preparations=[])["facts"])
    ledger.put(Entry(worker.device, facts["node_id"], facts["name"], disk.identity, disk.macs))
    ledger.save()
