"""What this node compares stages with: computed for the rehearsal model, else read from a qspec, its own or a neighbour's.

Owns where the qspec comes from. A node that has the model has the qspec beside it, since `meshd pull` records it and a fetch from
neighbours brings it along. One whose copy has none (it was pulled where there is no torch) asks its neighbours; until one answers
nobody is judged. A neighbour's qspec is taken at its word, as its owner has the mesh key; it is checked for shape and model only.

Errors: ModelNotFound, ModelRefused, saying what is missing and where it would come from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from meshd.admission.expected import Expected, RecordedModel, RehearsalModel
from meshd.admission.qspec import GoldenPrompt
from meshd.errors import MeshdError, ModelNotFound, ModelRefused
from meshd.models.qspec_file import QspecFile
from meshd.models.store import ModelStore
from meshd.node.model import Served

ASK_AGAIN_S: Final = 5.0


class Expectations:
    """Implements `admission.prober.Expectations`. ``bring_qspec`` puts a neighbour's qspec beside the stored model."""

    def __init__(
        self, store: ModelStore, served: Callable[[], Served | None], bring_qspec: Callable[[str], Awaitable[None]]
    ) -> None:
        self._store = store
        self._served = served
        self._bring_qspec = bring_qspec
        self._known: dict[str, Expected] = {}
        self._ask_from: dict[str, float] = {}

    async def __call__(self, digest: str) -> Expected:
        known = self._known.get(digest)
        if known is None:
            known = await self._find(digest)
            self._known = {digest: known}  # one model is served at a time
        return known

    async def _find(self, digest: str) -> Expected:
        served = self._served()
        if served is not None and served.spec.digest == digest and served.rehearsal is not None:
            return RehearsalModel(served.rehearsal.num_layers, served.rehearsal.seed)
        try:
            return await trio.to_thread.run_sync(self._read, digest)
        except ModelRefused as error:
            missing = error
        now = trio.current_time()
        if now < self._ask_from.get(digest, now):
            raise missing
        self._ask_from[digest] = now + ASK_AGAIN_S
        try:
            await self._bring_qspec(digest)
        except MeshdError as error:
            raise ModelNotFound(f"{missing.message}; {error.message}") from error
        return await trio.to_thread.run_sync(self._read, digest)

    def _read(self, digest: str) -> Expected:
        stored = self._store.by_digest(digest)
        if stored is None:
            raise ModelRefused(f"no qspec: model {digest[:16]} is not in the store")
        if not stored.qspec.is_file():
            raise ModelRefused(f"{stored.name} has no qspec here ('meshd qspec {stored.name}' records it)")
        spec = stored.manifest.spec
        qspec = QspecFile(stored.qspec, spec)
        golden = [GoldenPrompt(each.ids, each.argmax, each.margin) for each in qspec.golden]
        return RecordedModel(golden, qspec.rows, hidden_size=spec.hidden_size, num_layers=spec.num_layers)
