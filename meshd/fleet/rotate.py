"""`mass-equip rotate-key`: a new mesh key for every device, while the room serves.

Three steps, each finished everywhere before the next: all accept the new key, all send with it, all forget the old one. Two
devices that are one step apart always know each other's first key. Before the last step clients get a while to change to the API
key that the new key derives: both are good until then. The new key is noted before the first device gets it, so a
rotation that was interrupted goes on where it stopped when it is called again.
"""

from __future__ import annotations

import time
from typing import Any, Final

from meshd.errors import LocalError, UsageError
from meshd.fleet.device.facts import key_lines
from meshd.fleet.hosts import Device
from meshd.fleet.ledger import Ledger
from meshd.fleet.ssh import DeviceFailed
from meshd.fleet.work import Fleet, Worker, tell, until
from meshd.vocabulary import is_node_id

TAKEN_UP_S: Final = 60.0  # a daemon looks at the file every two seconds
STEPS: Final = ("accept the new key", "send with the new key", "forget the old key")


def rings(old: list[str], new: str) -> tuple[list[str], list[str], list[str]]:
    """The ring of each step, from a ring that has another key than the new one. Pure."""
    first = next(line for line in old if line != new)
    return [first, new], [new, first], [new]


def steps_left(old: list[str], new: str) -> list[tuple[str, list[str]]]:
    """The steps and rings that are still to come. ``old`` is the last one that every device has: to go back behind it would be to
    send with a key that a device may have forgotten by now. Pure."""
    steps = list(zip(STEPS, rings(old, new), strict=True))
    done = [ring for _, ring in steps].index(old) + 1 if old in (ring for _, ring in steps) else 0
    return steps[done:]


def barred_id(ledger: Ledger, word: str) -> tuple[str, Device | None]:
    """Who ``--except`` means: a node id, a node's name or a device of the ledger. Raises UsageError."""
    found = [
        entry for entry in ledger.entries if word in (entry.node_id, entry.name, str(entry.device), entry.device.host)
    ]
    if len(found) == 1 and found[0].node_id:
        return found[0].node_id, found[0].device
    if is_node_id(word):
        return word, None
    raise UsageError(
        f"--except {word}: {'several devices' if len(found) > 1 else 'no device of the fleet'}; name its node id"
    )


class Rotation:
    """One run. ``barred``: a node id that no link accepts from now on, and that does not get the new key. ``grace_s``: how long
    clients may still send the old API key once the new one is in the ledger."""

    def __init__(self, fleet: Fleet, barred: str = "", *, grace_s: float = 10.0, dry_run: bool = False) -> None:
        self.fleet, self.barred, self.grace_s, self.dry_run = fleet, barred, grace_s, dry_run
        self.ledger = fleet.ledger

    def run(self) -> None:
        """Raises LocalError when not every device can take part: nothing is lost by waiting, and much by going on."""
        self.fleet.each(self._look)
        self._all_well("nothing was changed")
        if self.dry_run:
            for worker in self.fleet.workers:
                worker.outcome.changes += [*([f"bar {self.barred[:8]}"] if self.barred else []), *STEPS]
            return
        if self.barred:
            self.fleet.each(self._bar)
            self._all_well("no key was changed")
        if not self.ledger.key:
            self.ledger.set_key(self.fleet.workers[0].ask("get_key")["lines"])
        if self._was_complete():
            self.ledger.set_rotation({})
            if not self.barred:  # who is to be shut out has that key, too: he is shut out by another one
                for worker in self.fleet.workers:
                    worker.outcome.warnings.append(
                        "the interrupted rotation had been done; run this again for another key"
                    )
                return
        new = self._new_key()
        for step, ring in steps_left(self.ledger.key, new):
            if step == STEPS[-1]:
                time.sleep(self.grace_s)
            self.fleet.each(lambda worker, step=step, ring=ring: self._push(worker, step, ring))  # type: ignore[misc]  # mypy cannot type a lambda's defaults
            self._all_well(f"the rotation stopped before all could {step}; no request is lost meanwhile")
            self.ledger.set_key(ring)
        self.ledger.set_rotation({})

    def _look(self, worker: Worker) -> None:
        worker.doing("looking")
        facts = worker.ask("facts", preparations=[])["facts"]
        if not facts["key"]:
            raise DeviceFailed("it has no mesh key; equip it first")
        seen = worker.ask("look")
        if "status" not in seen:
            raise DeviceFailed(seen["silent"])
        tell(worker, seen, facts)

    def _bar(self, worker: Worker) -> None:
        blocked = worker.ask("facts", preparations=[])["facts"]["blocked"]
        if self.barred not in key_lines(blocked):
            worker.ask("set_blocked", text=f"{blocked}{self.barred}\n")
            worker.did(f"barred {self.barred[:8]}")

    def _was_complete(self) -> bool:
        """True after a rotation that was interrupted when every device had forgotten the old key."""
        return bool(self.ledger.rotation) and self.ledger.key == [self.ledger.rotation["new"]]

    def _new_key(self) -> str:
        """The key of the rotation under way, else a fresh one, made by a device and noted before it is used."""
        if not self.ledger.rotation:
            self.ledger.set_rotation({"new": self.fleet.workers[0].ask("new_key")["lines"][0]})
        return str(self.ledger.rotation["new"])

    def _push(self, worker: Worker, step: str, ring: list[str]) -> None:
        worker.doing(step)
        ids = worker.ask("set_key", lines=ring, name=True)["mesh_ids"]
        shown: list[Any] = []

        def taken_up() -> bool:
            shown[:] = worker.ask("look").get("status", {}).get("mesh_ids", [])
            return bool(shown == ids)

        until(taken_up, TAKEN_UP_S, lambda: f"its daemon uses {shown or 'an unknown key'} instead of {ids}")
        worker.did(f"{step} ({ids[0]} sends)")

    def _all_well(self, stopped: str) -> None:
        failed = [str(worker.device) for worker in self.fleet.workers if worker.outcome.error]
        if failed:
            raise LocalError(
                f"{', '.join(failed)} cannot take part: {stopped}. Cure it and run this again; a device that is gone for good"
                " is left out with --except, or forgotten with: mass-equip remove --forget"
            )
