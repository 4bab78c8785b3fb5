"""A rotation that was interrupted after its last step is finished, whoever is to be shut out is shut out all the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from meshd.fleet.hosts import Device
from meshd.fleet.ledger import Ledger
from meshd.fleet.rotate import STEPS, Rotation
from meshd.fleet.work import Fleet


class Asker:
    """A device that keeps the ring it is given."""

    def __init__(self) -> None:
        self.ring = ["mesh-key-v1:B"]
        self.made = 0
        self.pushed: list[list[str]] = []

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        match do:
            case "facts":
                facts = {"key": "has one", "blocked": "", "service": "", "privilege": ""}
                return {"facts": facts}
            case "look":
                status = {"state": "ready", "reason": "", "layers": None, "version": "1", "model": "m", "name": "n"}
                return {"status": {**status, "node_id": "f" * 32, "mesh_ids": list(self.ring)}}
            case "new_key":
                self.made += 1
                return {"lines": [f"mesh-key-v1:{'BCD'[self.made]}"]}
            case "set_key":
                self.ring = request["lines"]
                self.pushed.append(self.ring)
                return {"mesh_ids": list(self.ring)}
            case _:
                return {}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _s: None)


@pytest.mark.parametrize(("barred", "ring", "made"), [("", ["mesh-key-v1:B"], 0), ("e" * 32, ["mesh-key-v1:C"], 1)])
def test_a_rotation_interrupted_at_its_very_end(tmp_path: Path, barred: str, ring: list[str], made: int) -> None:
    ledger = Ledger(tmp_path)
    ledger.set_rotation({"new": "mesh-key-v1:B"})
    ledger.set_key(["mesh-key-v1:B"])
    device = Asker()
    Rotation(Fleet([Device("one")], lambda _device: device, ledger), barred, grace_s=0.0).run()
    assert (ledger.key, ledger.rotation) == (ring, {})
    assert (device.ring, device.made) == (ring, made)
    Rotation(Fleet([Device("one")], lambda _device: device, ledger), grace_s=0.0).run()
    assert ledger.key == device.ring == [f"mesh-key-v1:{'CD'[made]}"]


@pytest.mark.parametrize(
    ("known", "pushed"),
    [("A", ["AB", "BA", "B"]), ("AB", ["BA", "B"]), ("BA", ["B"]), ("AC", ["AB", "BA", "B"])],
)
def test_a_rotation_goes_on_after_the_last_step_that_all_had_finished(
    tmp_path: Path, known: str, pushed: list[str]
) -> None:
    """One that stopped while the old key was being forgotten must not make anybody send with it again: some have done it."""
    ledger = Ledger(tmp_path)
    ledger.set_rotation({"new": "mesh-key-v1:B"})
    ledger.set_key([f"mesh-key-v1:{letter}" for letter in known])
    device = Asker()
    Rotation(Fleet([Device("one")], lambda _device: device, ledger), grace_s=0.0).run()
    assert ["".join(line[-1] for line in ring) for ring in device.pushed] == pushed
    assert (ledger.key, ledger.rotation) == (["mesh-key-v1:B"], {})


@pytest.mark.parametrize("barred", ["", "e" * 32])
def test_a_dry_run_changes_no_key(tmp_path: Path, barred: str) -> None:
    ledger, device = Ledger(tmp_path), Asker()
    ledger.set_key(["mesh-key-v1:B"])
    fleet = Fleet([Device("one")], lambda _device: device, ledger)
    Rotation(fleet, barred, dry_run=True).run()
    assert (ledger.key, ledger.rotation, device.pushed, device.made) == (["mesh-key-v1:B"], {}, [], 0)
    assert fleet.outcomes[0].changes == [*(["bar eeeeeeee"] if barred else []), *STEPS]
