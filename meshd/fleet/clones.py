"""Two disks with one identity: pure. A node key is made on its device and stays there; a copied disk brings it along.

A device that only got another address, or is named in another way, brings it along too. What tells the two apart is the machine:
the hardware addresses that its makers gave its interfaces are on no disk. Where none can be seen it counts as a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshd.fleet.hosts import Device
from meshd.fleet.ledger import Entry


@dataclass(frozen=True, slots=True)
class Disk:
    """What was found on a device: its node key's hash ("" for none) and the machine's hardware addresses."""

    identity: str
    macs: tuple[str, ...] = ()


def clones(found: Mapping[Device, Disk], known: Sequence[Entry]) -> dict[Device, str]:
    """Devices that need a new identity, and whose they hold.

    Whom the ledger knows with that key keeps it; among new devices the first does.
    """
    return {device: str(owner) for device, owner, same in _held_elsewhere(found, known) if not same}


def moved(found: Mapping[Device, Disk], known: Sequence[Entry]) -> dict[Device, Device]:
    """Devices that are known under another name or address, and under which."""
    return {device: owner for device, owner, same in _held_elsewhere(found, known) if same}


def _held_elsewhere(found: Mapping[Device, Disk], known: Sequence[Entry]) -> Iterator[tuple[Device, Device, bool]]:
    """Devices whose key another one holds already, which, and whether both are one machine."""
    owners = {entry.identity: (entry.device, entry.macs) for entry in reversed(known) if entry.identity}
    for device, disk in found.items():
        if disk.identity:
            owner, macs = owners.setdefault(disk.identity, (device, disk.macs))
            if owner.where != device.where:
                yield device, owner, bool(set(disk.macs) & set(macs))
