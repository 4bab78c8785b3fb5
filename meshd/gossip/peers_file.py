"""Addresses of live peers, remembered over a restart, so that a room finds itself again without mDNS and ``--join``.

A short JSON list, written whole; a damaged one is as good as none. Hints only, like every other candidate.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from meshd.directory import Member
from meshd.identity.state_folder import write_whole
from meshd.vocabulary import Endpoint, NodeStatus

MAX_PEERS: Final = 64
_MAX_BYTES: Final = 64 << 10

_log = logging.getLogger(__name__)


def read(path: Path) -> list[Endpoint]:
    """What was remembered; empty where there is nothing usable."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return []
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [Endpoint.parse(entry) for entry in entries[:MAX_PEERS] if isinstance(entry, str)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        _log.warning("%s cannot be read (%s): starting without remembered peers", path, error)
        return []


def addresses(members: Iterable[Member]) -> list[Endpoint]:
    """One address of each live peer, the one that works."""
    live = (NodeStatus.ALIVE, NodeStatus.DRAINING, NodeStatus.SUSPECT)
    best = [(m.source, *m.advert.addresses) for m in members if m.via != "self" and m.state in live]
    return sorted({e for e in (next((a for a in known if a), None) for known in best) if e is not None})[:MAX_PEERS]


def write(path: Path, endpoints: Iterable[Endpoint]) -> None:
    """Replace what was remembered. A full disk costs the hint, not the node."""
    try:
        write_whole(path, json.dumps([str(e) for e in endpoints]).encode())
    except OSError as error:
        _log.warning("%s cannot be written: %s", path, error)
