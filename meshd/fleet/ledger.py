"""What the administrator's machine remembers of a fleet: its devices and its mesh key, in one folder (0700).

A later `status`, `upgrade` or `rotate-key` then means every device, not those that somebody remembered to type. The key ring is
here, too, so that a new device gets it without asking an old one. `rotation.json` exists while a rotation is under way.
Raises LocalError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshd.errors import LocalError
from meshd.fleet.device.facts import key_lines
from meshd.fleet.device.places import write_whole
from meshd.fleet.device.shell import Trouble
from meshd.fleet.hosts import Device


def default_folder() -> Path:
    """Beside the other settings of the user."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "meshd" / "fleet"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else changes this fleet meanwhile: two runs would make two keys, or forget each other's devices.

    Raises LocalError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / "lock").open("w", encoding="ascii")
    except OSError as error:
        raise LocalError(f"{folder} cannot be used: {error.strerror or error}; choose another with --fleet") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however that ends
        except OSError:
            raise LocalError(f"another mass-equip changes the fleet of {folder}; wait until it is done") from None
        yield


@dataclass(frozen=True, slots=True)
class Entry:
    """A device and who it was when it was last seen. ``identity``: the hash of its node key, to notice a cloned disk; ``macs``
    tell the machine under another address from one."""

    device: Device
    node_id: str = ""
    name: str = ""
    identity: str = ""
    macs: tuple[str, ...] = ()


@dataclass(slots=True)
class Ledger:
    """The folder's content; `save` after a change. ``flags``: what all devices were told, until they are told otherwise."""

    folder: Path
    entries: list[Entry] = field(default_factory=list)
    flags: str = ""

    @classmethod
    def load(cls, folder: Path) -> Ledger:
        path = folder / "fleet.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"devices": []}
            return cls(folder, [_entry(item) for item in document["devices"]], str(document.get("flags", "")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LocalError(f"{path} is damaged ({error}); move it away and name the devices again") from None

    def save(self) -> None:
        document = {"flags": self.flags, "devices": [dataclasses.asdict(entry) for entry in self.entries]}
        self._write("fleet.json", json.dumps(document, indent=2) + "\n")

    @property
    def devices(self) -> list[Device]:
        return [entry.device for entry in self.entries]

    def entry(self, device: Device) -> Entry:
        return next((entry for entry in self.entries if entry.device.where == device.where), Entry(device))

    def put(self, entry: Entry) -> None:
        """Add or replace, keeping the order in which devices came."""
        where = entry.device.where
        if any(known.device.where == where for known in self.entries):
            self.entries = [entry if known.device.where == where else known for known in self.entries]
        else:
            self.entries.append(entry)

    def forget(self, device: Device) -> None:
        self.entries = [entry for entry in self.entries if entry.device.where != device.where]

    # --- the mesh key -------------------------------------------------------------------------------------------------

    @property
    def key(self) -> list[str]:
        """The ring's lines, the key that sends first; empty while there is none."""
        return key_lines(self._read("mesh.key"))

    def set_key(self, lines: list[str]) -> None:
        self._write("mesh.key", "".join(f"{line}\n" for line in lines))

    @property
    def rotation(self) -> dict[str, Any]:
        """The rotation under way, {} for none."""
        text = self._read("rotation.json")
        return dict(json.loads(text)) if text else {}

    def set_rotation(self, rotation: dict[str, Any]) -> None:
        if rotation:
            self._write("rotation.json", json.dumps(rotation) + "\n")
        else:
            (self.folder / "rotation.json").unlink(missing_ok=True)

    def _read(self, name: str) -> str:
        """A file's text, "" when there is none."""
        path = self.folder / name
        try:
            return path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, ValueError) as error:
            raise LocalError(f"{path} cannot be read: {error}") from None

    def _write(self, name: str, text: str) -> None:
        try:
            write_whole(self.folder / name, text)
        except Trouble as trouble:
            raise LocalError(str(trouble)) from None


def _entry(item: dict[str, Any]) -> Entry:
    known = dict(item["device"])
    device = Device(**{**known, "flags": tuple(known["flags"])})
    macs = tuple(map(str, item.get("macs", ())))  # a ledger of an earlier version has none
    return Entry(device, str(item["node_id"]), str(item["name"]), str(item["identity"]), macs)
