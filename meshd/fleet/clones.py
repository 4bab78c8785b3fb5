"""Two disks with one identity: pure. A node key is made on its device and stays there; a copied disk brings it along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshd.fleet.hosts import Device
from meshd.fleet.ledger import Entry


def clones(found: Mapping[Device, str], known: Sequence[Entry]) -> dict[Device, str]:
    """Devices that need a new identity, and whose they hold. ``found``: each device's node key hash ("" for none).

    Whom the ledger knows with that key keeps it; among new devices the first does.
    """
    owners = {entry.identity: entry.device for entry in reversed(known) if entry.identity}
    copies = {}
    for device, identity in found.items():
        if not identity:
            continue
        owner = owners.setdefault(identity, device)
        if owner.where != device.where:
            copies[device] = str(owner)
    return copies
