"""Which model this node serves, and where it is on this device.

Owns the way from ``--model`` and ``--dtype`` to a spec and a folder. Fetching runs in a child process (`meshd pull`): the
hub's and GGUF's libraries are far larger than the daemon.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from meshd.config import Config
from meshd.errors import LocalError, ModelNotFound
from meshd.models.hash_model import HashModel, is_hash_model, parse_hash_model
from meshd.models.store import ModelStore, StoredModel
from meshd.vocabulary import ModelSpec, stored_name


@dataclass(frozen=True, slots=True)
class Served:
    """A model that can be loaded here: from ``folder``, or computed (``rehearsal``)."""

    spec: ModelSpec
    folder: Path | None = None
    rehearsal: HashModel | None = None

    def within(self, context: int | None) -> Served:
        """The same model, of whose sessions none grows beyond ``context`` tokens here."""
        if context is None or context >= self.spec.context:
            return self
        return replace(self, spec=replace(self.spec, context=context))


def named(config: Config, store: ModelStore) -> Served | None:
    """The model of ``--model`` in the dtype asked for; None when it is not named, or not in the store."""
    if config.model is None:
        return None
    if is_hash_model(config.model):
        rehearsal = parse_hash_model(config.model)
        return Served(rehearsal.spec, rehearsal=rehearsal)
    return _stored(store.find(config.model), config, store)


def by_digest(digest: str, store: ModelStore) -> Served | None:
    """What the room serves, if it is in the store."""
    found = store.by_digest(digest)
    return Served(found.spec, found.path) if found is not None else None


def _stored(model: StoredModel | None, config: Config, store: ModelStore) -> Served | None:
    if model is None:
        return None
    if config.dtype not in ("auto", model.spec.dtype) and "@" not in model.name:
        # Another arithmetic gives other tokens, so it is another model to the room.
        variant = store.find(f"{model.name}@{config.dtype}")
        if variant is None:
            raise ModelNotFound(f"--dtype {config.dtype} is not possible for {model.name}")
        model = variant
    return Served(model.spec, model.path)


async def fetch(name: str, state_dir: Path, log: Callable[[str], None]) -> None:
    """`meshd pull` in a child process; ``log`` gets its lines. Raises LocalError with its last words."""
    command = [sys.executable, "-m", "meshd", "pull", stored_name(name), "--state-dir", str(state_dir)]
    last, status = "", -1
    async with trio.open_nursery() as nursery:
        try:
            process: trio.Process = await nursery.start(
                lambda task_status: trio.run_process(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, task_status=task_status
                )
            )
        except OSError as error:  # no memory or no descriptor is left
            last = f"meshd pull {name} cannot be started: {error.strerror or error}"
        else:
            if process.stderr is not None:
                async for chunk in process.stderr:
                    for line in chunk.decode("utf-8", "replace").splitlines():
                        last = line or last
                        log(line)
            status = await process.wait()
    if status != 0:
        raise LocalError(last.removeprefix("meshd: ") or f"meshd pull {name} failed ({status})")
