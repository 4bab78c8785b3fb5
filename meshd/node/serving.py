"""From "no model yet" to layers that run: finds the model, starts its text side, and says which layers to hold.

Owns which model this node serves (`served`), its tokenizer (`text`) and why it serves nothing (`reason`). A node whose model is
not here yet, or too large for a single layer, is a member and an entry all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import trio

from meshd.config import Config
from meshd.directory import Directory
from meshd.election.capacity import check_fit
from meshd.election.elect import elect
from meshd.errors import DoesNotFit, MeshdError
from meshd.eventlog import EventLog
from meshd.inference.hash_text import HashText
from meshd.inference.keeper import StageKeeper
from meshd.inference.text import Text
from meshd.inference.text_engine import TextEngine
from meshd.models.store import ModelStore
from meshd.node import model
from meshd.node.model import Served
from meshd.node.stage_loader import election_settings
from meshd.vocabulary import LayerRange, ModelSpec, NodeId

SETTLE_S: Final = 2.0
LOOK_S: Final = 0.5
RETRY_S: Final = 10.0


class Serving:
    """Run it in a nursery. ``on_change`` is called when anything a peer should know changed."""

    def __init__(
        self,
        config: Config,
        node_id: NodeId,
        capacity_mb: int,
        *,
        keeper: StageKeeper,
        directory: Callable[[], Directory],
        log: EventLog,
        on_change: Callable[[], None],
        worker_said: Callable[[str], None],
    ) -> None:
        self._config, self._node_id, self._capacity_mb = config, node_id, capacity_mb
        self._keeper, self._directory, self._log = keeper, directory, log
        self._on_change, self._worker_said = on_change, worker_said
        self._store = ModelStore.under(config.state)
        self.served: Served | None = None
        self.text: Text | None = None
        self.reason = ""

    @property
    def spec(self) -> ModelSpec | None:
        return self.served.spec if self.served else None

    async def run(self) -> None:
        """Until cancelled. Raises DoesNotFit for a pinned range that cannot be: the daemon ends with it."""
        async with trio.open_nursery() as nursery:
            self.served = await self._find()
            await self._start_text(nursery, self.served)
            self._on_change()
            await self._choose_layers(self.served.spec)
            await trio.sleep_forever()

    async def _start_text(self, nursery: trio.Nursery, served: Served) -> None:
        try:
            if served.folder is None:
                self.text = HashText()
            else:
                self.text = await TextEngine.start(nursery, served.folder, log=self._worker_said)
        except MeshdError as error:
            self._failed(error)

    async def _find(self) -> Served:
        while True:
            served = model.named(self._config, self._store)
            if served is None and self._config.model is not None and not self._config.offline:
                served = await self._fetch(self._config.model)
            if served is None and self._config.model is None:
                served = model.by_digest(rooms_digest(self._directory()), self._store)
            if served is not None:
                self.reason = ""
                return served
            await trio.sleep(LOOK_S if self._config.model is None else RETRY_S)

    async def _fetch(self, name: str) -> Served | None:
        self.reason = f"fetching {name}"
        try:
            await model.fetch(name, self._config.state, lambda line: self._log.emit("pull", level="debug", text=line))
        except MeshdError as error:
            self._failed(error)
        return model.named(self._config, self._store)

    def _failed(self, error: MeshdError) -> None:
        self.reason = error.message
        self._log.emit("failed", level="error", reason=error.message)

    async def _choose_layers(self, spec: ModelSpec) -> None:
        settings = election_settings(self._config)
        if self._config.layers is not None:
            check_fit(spec, self._config.layers, self._capacity_mb, settings)
            self._want(self._config.layers)
            return
        await trio.sleep(SETTLE_S)
        while True:
            adverts = [member.advert for member in self._directory().members.values()]
            with contextlib.suppress(DoesNotFit):
                layers = elect(spec, adverts, self._node_id, settings)
                if layers is not None:
                    self._want(layers)
                    return
            self.reason = f"{self._capacity_mb} MB are too small for a layer of {spec.name}"
            await trio.sleep(SETTLE_S)

    def _want(self, layers: LayerRange) -> None:
        self._log.emit("stage", text=f"takes {layers}", layers=layers.json())
        self._keeper.want(layers)


def rooms_digest(directory: Directory) -> str:
    """The model that most peers serve, "" while none does."""
    held = [member.advert.digest for member in directory.peers if member.advert.digest]
    return max(sorted(set(held)), key=held.count, default="")
