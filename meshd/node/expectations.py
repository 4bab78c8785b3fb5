"""What this node compares stages with: computed for the rehearsal model, else read from a qspec, its own or a neighbour's.

Owns where the qspec comes from. A node that has the model has the qspec beside it, since `meshd pull` records it and a fetch from
neighbours brings it along. One whose copy has none (it was pulled where there is no torch) asks its neighbours, and where none
has one either, and torch and the whole model are here, records it in a child process; until then nobody is judged. A neighbour's
qspec is taken at its word, as its owner has the mesh key; it is checked for shape and model only.

Errors: ModelNotFound, ModelRefused, saying what is missing and where it would come from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
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
        self,
        store: ModelStore,
        served: Callable[[], Served | None],
        bring_qspec: Callable[[str], Awaitable[None]],
        log: Callable[[str], None],
    ) -> None:
        self._store = store
        self._served = served
        self._bring_qspec = bring_qspec
        self._log = log
        self._known: dict[str, Expected] = {}
        self._record, self._to_record = trio.open_memory_channel[Path](1)
        self._recorded: set[Path] = set()
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
            await self._have_recorded(digest)
            raise ModelNotFound(f"{missing.message}; {error.message}") from error
        return await trio.to_thread.run_sync(self._read, digest)

    async def run(self) -> None:
        """Record what is to be recorded, until cancelled."""
        async for folder in self._to_record:
            self._log(f"nobody has a qspec of {folder.name}: recording it")
            command = [sys.executable, "-m", "meshd.inference.worker.record_qspec", str(folder)]
            try:
                done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
            except OSError as error:  # no memory or no descriptor is left: whoever asks next has it tried again
                self._log(f"no qspec: {error.strerror or error}")
                self._recorded.discard(folder)
                continue
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            self._log(
                "the qspec is recorded" if done.returncode == 0 else f"no qspec: {said[-1] if said else 'it died'}"
            )

    async def _have_recorded(self, digest: str) -> None:
        """Ask for a recording, once, where one can be made."""
        folder = await trio.to_thread.run_sync(self._whole, digest)
        if folder is not None and folder not in self._recorded:
            with contextlib.suppress(trio.WouldBlock):
                self._record.send_nowait(folder)
                self._recorded.add(folder)

    def _whole(self, digest: str) -> Path | None:
        """The model's folder, if all of it is here and there is an engine to run it."""
        stored = self._store.by_digest(digest)
        if stored is None or importlib.util.find_spec("torch") is None:
            return None
        return stored.path if stored.open().held() == (stored.spec.whole,) else None

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
