"""Sees to it that what some layers need is on this disk before they are loaded.

Owns the order of sources: this disk, the neighbours, then the model's own source (unless ``--offline``). What is missing here and
to be had nowhere is named by file and layer. Errors: ModelRefused, StoreFull, StateError.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from meshd.errors import LocalError, MeshdError, ModelRefused, StateError, StoreFull
from meshd.models.manifest import read_manifest
from meshd.models.spec import tensors_of
from meshd.node.fetcher import Fetcher
from meshd.node.model import Served
from meshd.vocabulary import LayerRange, stored_name

Pull = Callable[[str], Awaitable[None]]


class Weights:
    """``pull`` fetches a model by name from its source; None where that is not allowed."""

    def __init__(self, fetcher: Fetcher, pull: Pull | None) -> None:
        self._fetcher = fetcher
        self._pull = pull

    async def ensure(self, served: Served, layers: LayerRange, progress: Callable[[float], None]) -> None:
        """Return when everything that ``layers`` need is in the model's folder."""
        folder = served.folder
        if folder is None:
            return
        lacking = await trio.to_thread.run_sync(_lacking, folder, layers)
        if lacking is None:
            return
        try:
            await self._fetcher.fetch(served.spec.digest, layers, progress)
        except (StoreFull, StateError):
            raise
        except MeshdError as error:
            await self._from_source(served, layers, lacking, error)

    async def _from_source(
        self, served: Served, layers: LayerRange, lacking: ModelRefused, why_not: MeshdError
    ) -> None:
        if self._pull is None or served.folder is None:
            raise ModelRefused(f"{lacking.message}; neighbours: {why_not.message}")
        try:
            await self._pull(stored_name(served.spec.name))
        except LocalError as error:
            raise ModelRefused(f"{lacking.message}; neighbours: {why_not.message}; source: {error.message}") from error
        still = await trio.to_thread.run_sync(_lacking, served.folder, layers)
        if still is not None:
            raise still


def _lacking(folder: Path, layers: LayerRange) -> ModelRefused | None:
    """What is missing of ``layers``. Raises ModelRefused where the model was stored without it: nobody can complete that."""
    try:
        tensors_of(folder, layers)
    except ModelRefused as error:
        if read_manifest(folder).missing_files:
            raise
        return error
    return None
