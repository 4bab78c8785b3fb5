"""The range this node held last, so that a reboot takes it again (its weights are on this disk already)."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Final

from meshd.identity.state_folder import write_whole
from meshd.vocabulary import LayerRange

FILE: Final = "range.json"


def read(state: Path, digest: str) -> LayerRange | None:
    """What was held of this model; None when it was another one or nothing, or the file is damaged."""
    try:
        document = json.loads((state / FILE).read_bytes())
        if document["digest"] == digest:
            return LayerRange(*document["layers"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def write(state: Path, digest: str, layers: LayerRange) -> None:
    """Remember. A disk that refuses costs a reboot an election, no more."""
    with contextlib.suppress(OSError):
        write_whole(state / FILE, json.dumps({"digest": digest, "layers": layers.json()}).encode())
