"""What this device is, has and holds, without changing anything."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import platform
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

from meshd.fleet.device import environments, places, service
from meshd.fleet.device.shell import privilege

MB = 1 << 20
_SIOCGIFHWADDR = 0x8927


def facts() -> dict[str, Any]:
    """One document; see the keys."""
    stamp = environments.current()
    return {
        "arch": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "hostname": socket.gethostname(),
        "user": getpass.getuser(),
        "privilege": privilege(),
        "service": service.kind(),
        "termux": places.is_termux(),
        "ram_mb": _ram_bytes() // MB,
        "disk_free_mb": shutil.disk_usage(_existing(places.home())).free // MB,
        "stamp": stamp,
        "environment": environments.described(stamp),
        "key": key_hash(places.read(places.state() / "mesh.key")),
        "identity": _hash(places.read(places.state() / "node.key")),
        "macs": _macs(),
        "config": places.read(places.state() / "meshd.toml"),
        "blocked": places.read(places.state() / "blocked"),
        "range": places.read(places.state() / "range.json"),
        "installed": service.is_installed(),
        "running": service.running(),
        "untold": places.untold().exists(),
        "boot_warning": service.boot_warning(),
        "undo": sorted(path.name for path in places.undo().glob("*")),
    }


def key_lines(text: str) -> list[str]:
    """The keys in a mesh key file, the one that sends first."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def key_hash(text: str) -> str:
    """Compares rings without telling them; "" for none."""
    return _hash("\n".join(key_lines(text)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _macs() -> list[str]:
    """What the makers of this machine's interfaces wrote into them. An address that a program chose (a bridge's, a randomised one
    of Wi-Fi) says nothing of the machine, and may be on its disk."""
    found: set[bytes] = set()
    with contextlib.suppress(OSError):  # Android tells nobody
        for _, name in socket.if_nameindex():
            found |= _hardware_address(name)
    return sorted(mac.hex(":") for mac in found if any(mac) and not mac[0] & 0b11)


def _hardware_address(interface: str) -> set[bytes]:
    """Of one interface, if it has any and this system is Linux."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return {fcntl.ioctl(asked, _SIOCGIFHWADDR, struct.pack("256s", interface.encode()[:15]))[18:24]}
    return set()


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
