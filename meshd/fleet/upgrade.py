"""`mass-equip upgrade`: the new version beside the old one everywhere, then one device after the other.

A device that does not come back with the new version goes back to the one it had, and is reported. The others go on: the check
before each restart keeps the room covered whatever happened before it.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from meshd.fleet import rolling
from meshd.fleet.equip import Wish, build, engine_fits, remember
from meshd.fleet.ssh import DeviceFailed
from meshd.fleet.wheels import Cargo
from meshd.fleet.work import Fleet, Worker, tell


class Upgrade:
    """One run over a fleet."""

    def __init__(self, fleet: Fleet, wish: Wish, cargo: Cargo, place: Path) -> None:
        self.fleet, self.wish, self.cargo, self.place = fleet, wish, cargo, place
        self._facts: dict[str, dict[str, Any]] = {}
        self._packing = threading.Lock()

    def run(self) -> None:
        """Raises nothing for a device: its outcome says what happened."""
        self.fleet.each(self._build)
        if self.wish.dry_run:
            return
        for worker in self.fleet.well:
            self.fleet.each(self._restart, [worker])

    def _stamp(self, facts: dict[str, Any]) -> str:
        engine = engine_fits(self.wish, facts)
        return self.cargo.stamp(engine=engine, system_site_packages=self.wish.system_site_packages)

    def _build(self, worker: Worker) -> None:
        worker.doing("looking")
        facts = self._facts[str(worker.device)] = worker.ask("facts", preparations=[])["facts"]
        if not facts["stamp"]:
            raise DeviceFailed("meshd is not installed here; equip it first")
        if (seen := worker.ask("look")) and "status" in seen:
            tell(worker, seen, facts)
        if facts["stamp"] == self._stamp(facts):
            return
        if self.wish.dry_run:
            worker.outcome.changes.append(f"upgrade {facts['stamp']} to {self._stamp(facts)}")
            return
        with self._packing:
            payload = self.cargo.pack(facts["arch"], self.place)
        build(worker, self.cargo, self._stamp(facts), payload, self.wish, engine=engine_fits(self.wish, facts))

    def _restart(self, worker: Worker) -> None:
        facts = self._facts[str(worker.device)]
        stamp, version = self._stamp(facts), self.cargo.version
        runs_it = worker.outcome.facts.get("version") == version and not facts["untold"]
        if facts["stamp"] == stamp and runs_it:
            worker.doing("up to date")
            return
        before = worker.ask("switch", stamp=stamp)["before"] if facts["stamp"] != stamp else ""
        try:
            seen = rolling.restart(worker, self.fleet, version=version, accept_gap=self.wish.accept_gap)
        except DeviceFailed as failed:
            raise DeviceFailed(f"{failed}{self._back(worker, before)}") from None
        tell(worker, seen, facts)
        remember(self.fleet.ledger, worker)
        worker.did(f"upgraded {before} to {stamp}" if before else f"restarted with {stamp}")
        worker.doing(f"runs {version}")

    def _back(self, worker: Worker, before: str) -> str:
        """Use the version before again; what the report says of it."""
        if not before:
            return ""
        with contextlib.suppress(DeviceFailed):
            worker.ask("switch", stamp=before)
            status = worker.ask("look").get("status", {})
            if status.get("version") != before.rpartition("-")[0] or status.get("state") == "draining":
                worker.ask("restart")
            return f" (back to {before})"
        return f" (and going back to {before} failed)"
