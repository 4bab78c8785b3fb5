"""What a device is told: the text of its meshd.toml, decided from the command, the device and what it was told before."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshd.fleet.hosts import Device, settings_of
from meshd.vocabulary import Endpoint

HEAD: Final = (
    "# Written by mass-equip; overwritten by its next run. A device's own settings belong into its [[device]] table.\n"
)
MAX_SEEDS: Final = 3  # to join through; from there on gossip knows everybody
HTTP_PORT: Final = 8090
MESH_PORT: Final = 8091


def settings(
    device: Device, *, model: str | None, flags: Sequence[str], seeds: Sequence[str], before: str
) -> dict[str, Any]:
    """The keys of meshd.toml. ``flags`` are for all devices, the device's own win.

    Whom to join is decided once: a later run, which sees other devices alive, must not change a file that works. A model that is
    not named again stays.
    """
    told = _told(before)
    found: dict[str, Any] = {}
    if named := model or (told or {}).get("model"):
        found["model"] = named
    if device.layers is not None:
        found["layers"] = device.layers
    if device.capacity_mb is not None:
        found["capacity_mb"] = device.capacity_mb
    joins = list(seeds[:MAX_SEEDS]) if told is None else told.get("join", [])
    if joins:
        found["join"] = joins
    return found | settings_of(flags, "flags") | settings_of(device.flags, f"{device}: flags")


def text_of(settings: Mapping[str, Any]) -> str:
    """As TOML. JSON's strings, lists and truth values are TOML's too."""
    return HEAD + "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in sorted(settings.items())
    )


def ports_of(settings: Mapping[str, Any]) -> tuple[int, int]:
    """HTTP and mesh port, for the firewall."""
    return _port(settings.get("http"), HTTP_PORT), _port(settings.get("mesh"), MESH_PORT)


def _port(endpoint: object, default: int) -> int:
    try:
        return Endpoint.parse(str(endpoint or ""), default).port
    except ValueError:
        return default  # the device's own meshd says what is wrong with it


def _told(before: str) -> dict[str, Any] | None:
    """What this device was told by an earlier run; None for a file that is not ours, or damaged: it is replaced."""
    if not before.startswith(HEAD):
        return None
    try:
        return tomllib.loads(before)
    except tomllib.TOMLDecodeError:
        return None
