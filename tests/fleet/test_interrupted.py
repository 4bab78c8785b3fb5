"""A run that was killed between a change and the restart that makes it count: the next one restarts, drained as ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.fleet.device import main, places, preparing, service
from meshd.fleet.device.facts import key_hash
from meshd.fleet.device.shell import Done, Trouble
from meshd.fleet.equip import Equipping, Wish
from meshd.fleet.hosts import Device
from meshd.fleet.ledger import Entry, Ledger
from meshd.fleet.settings import settings, text_of
from meshd.fleet.upgrade import Upgrade
from meshd.fleet.work import Fleet

KEY = "mesh-key-v1:A"
ONE = Device("one")
CARGO: Any = SimpleNamespace(version="1", stamp=lambda **_: "1-a")


class Asker:
    """A device that has all that it should; its daemon was drained for a restart that never came."""

    def __init__(self, *, untold: bool) -> None:
        self.untold = untold
        self.pid = 100
        self.asked: list[str] = []

    def ask(self, do: str, **_request: Any) -> dict[str, Any]:
        self.asked.append(do)
        match do:
            case "facts":
                config = text_of(settings(ONE, model="m", flags=(), seeds=(), before=""))
                facts = {"identity": "i", "running": self.pid, "service": "cron", "privilege": "root", "arch": "x86_64"}
                facts |= {"ram_mb": 100, "termux": False, "stamp": "1-a", "config": config, "boot_warning": ""}
                facts |= {
                    "macs": ["b8:27:eb:00:00:01"],
                    "key": key_hash(KEY),
                    "installed": True,
                    "untold": self.untold,
                    "range": "",
                }
                return {"facts": facts, "preparations": []}
            case "restart":
                before, self.pid, self.untold = self.pid, self.pid + 1, False
                return {"before": before}
            case "drain":
                return {"left": ""}
            case "look":
                status = {"state": "draining" if self.untold else "ready", "reason": "", "layers": None, "version": "1"}
                hive = {"digest": "d", "stages": [], "status": "healthy"}
                return {
                    "status": {**status, "model": "m", "name": "n", "node_id": "f" * 32},
                    "hive": hive,
                    "pid": self.pid,
                }
            case _:
                raise AssertionError(do)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)


@pytest.mark.parametrize("untold", [True, False])
@pytest.mark.parametrize("command", ["equip", "upgrade"])
def test_what_a_daemon_was_not_told_is_a_reason_to_restart_it(tmp_path: Path, command: str, untold: bool) -> None:
    ledger, device = Ledger(tmp_path), Asker(untold=untold)
    ledger.set_key([KEY])
    fleet = Fleet([ONE], lambda _device: device, ledger, wait_s=1.0)
    if command == "equip":
        Equipping(fleet, [], Wish(model="m"), CARGO, tmp_path).run()
    else:
        Upgrade(fleet, Wish(), CARGO, tmp_path).run()
    assert fleet.outcomes[0].error == ""
    assert [do for do in device.asked if do in ("drain", "restart")] == (["drain", "restart"] if untold else [])


def test_a_device_notes_what_its_daemon_was_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stop", "start", "install"):
        monkeypatch.setattr(service, name, lambda: None)
    monkeypatch.setattr(main, "run", lambda *_words, **_more: Done(0, ""))
    changes: list[Callable[[], object]] = [
        lambda: main._set_config({"text": ""}),
        lambda: main._switch({"stamp": "1-a"}),
        lambda: main._set_key({"lines": [KEY], "name": False}),
        lambda: main._install_service({}),
    ]
    for change in changes:
        places.environments().mkdir(parents=True, exist_ok=True)
        change()
        assert places.untold().exists()
        main._restart({})
        assert not places.untold().exists()


def test_a_device_that_leaves_keeps_no_key_whatever_cannot_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[str]:
        raise Trouble("undoing ufw: no")

    monkeypatch.setattr(preparing, "undo_all", refuse)
    for name in ("stop", "uninstall"):
        monkeypatch.setattr(service, name, lambda: None)
    key = places.state() / "mesh.key"
    places.write_whole(key, KEY)
    with pytest.raises(Trouble):
        main._remove({"purge": False})
    assert not key.exists()


def test_a_device_that_got_another_address_stays_who_it_is(tmp_path: Path) -> None:
    ledger, device = Ledger(tmp_path), Asker(untold=False)
    ledger.set_key([KEY])
    ledger.put(Entry(Device("before"), "f" * 32, "n", "i", ("b8:27:eb:00:00:01",)))
    fleet = Fleet([ONE], lambda _device: device, ledger, wait_s=1.0)
    Equipping(fleet, [], Wish(model="m"), CARGO, tmp_path).run()
    assert (fleet.outcomes[0].error, "identity" in device.asked) == ("", False)
    assert fleet.outcomes[0].warnings == ["this is before under another name or address"]
    assert Ledger.load(tmp_path).devices == [ONE]
    both = Fleet([ONE, Device("alias")], lambda _device: device, ledger, wait_s=1.0)
    Equipping(both, [], Wish(model="m"), CARGO, tmp_path).run()
    assert [outcome.error for outcome in both.outcomes] == ["", "this is one under another name; name it once"]
