"""From "no model yet" to layers that run: finds the model, starts its text side, and says which layers to hold.

Owns which model this node serves (`served`), its tokenizer (`text`), its part in the election (`electing`) and why it serves
nothing (`reason`). A node whose model is not here yet, or too large for a single layer, is a member and an entry all the same:
of a model that is not in the store it takes the small files from the neighbours, and weights only for layers that it gets. A
model that no neighbour has comes from its own source, whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from meshd.config import Config
from meshd.directory import Directory
from meshd.election.capacity import check_fit
from meshd.errors import EngineFailed, MeshdError, StateError, StoreFull
from meshd.eventlog import EventLog
from meshd.identity.node_key import Identity
from meshd.inference.hash_text import HashText
from meshd.inference.keeper import StageKeeper
from meshd.inference.text import Text
from meshd.inference.text_engine import TextEngine
from meshd.links.wire import Links
from meshd.models.store import ModelStore
from meshd.node import last_range, model
from meshd.node.electing import Electing
from meshd.node.fetcher import Fetcher
from meshd.node.model import Served
from meshd.node.stage_loader import election_settings
from meshd.vocabulary import ModelSpec, NodeStatus, stored_name

LOOK_S: Final = 0.25
NEIGHBOURS_S: Final = 3.0  # a room is heard of within a second or two; only then a model's own source is asked
RETRY_S: Final = 10.0


class Serving:
    """Run it in a nursery. ``on_change`` is called when anything a peer should know changed."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        capacity_mb: int,
        *,
        keeper: StageKeeper,
        links: Links,
        fetcher: Fetcher,
        directory: Callable[[], Directory],
        log: EventLog,
        on_change: Callable[[], None],
        worker_said: Callable[[str], None],
    ) -> None:
        self._config, self._identity, self._capacity_mb = config, identity, capacity_mb
        self._keeper, self._links, self._directory, self._log = keeper, links, directory, log
        self._fetcher = fetcher
        self._on_change, self._worker_said = on_change, worker_said
        self._store = ModelStore.under(config.state)
        self.served: Served | None = None
        self.text: Text | None = None
        self.electing: Electing | None = None
        self._trouble = ""
        self._meet_from = 0.0  # neighbours are asked for the model from then on

    @property
    def reason(self) -> str:
        """Why this node serves nothing, "" if there is nothing to say."""
        return self._trouble or (self.electing.reason if self.electing is not None else "")

    @property
    def spec(self) -> ModelSpec | None:
        return self.served.spec if self.served else None

    async def run(self) -> None:
        """Until cancelled. Raises DoesNotFit for a pinned range that cannot be: the daemon ends with it."""
        async with trio.open_nursery() as nursery:
            self.served = (await self._find()).within(self._config.context)
            if not await self._start_text(nursery, self.served):
                nursery.start_soon(self._start_text_later, nursery, self.served)
            self._on_change()
            await self._elect(self.served.spec)

    async def _start_text(self, nursery: trio.Nursery, served: Served) -> bool:
        """False: not now, as its process came to nothing. A tokenizer that is refused will be refused again."""
        try:
            if served.folder is None:
                self.text = HashText()
            else:
                self.text = await TextEngine.start(nursery, served.folder, log=self._worker_said)
        except MeshdError as error:
            self._failed(error)
            return not isinstance(error, EngineFailed)
        self._trouble = ""
        return True

    async def _start_text_later(self, nursery: trio.Nursery, served: Served) -> None:
        """A device short of memory may have some in a while; else it would be no entry before its next start."""
        await trio.sleep(RETRY_S)
        while not await self._start_text(nursery, served):
            await trio.sleep(RETRY_S)
        self._on_change()

    async def _find(self) -> Served:
        source_from = trio.current_time() + NEIGHBOURS_S
        while True:
            served = model.named(self._config, self._store) or await self._from_neighbours()
            pulls = self._config.model is not None and not self._config.offline
            if served is None and pulls and trio.current_time() >= source_from:
                served = await self._fetch(str(self._config.model))
                source_from = trio.current_time() + RETRY_S
            if served is not None:
                self._trouble = ""
                return served
            await trio.sleep(LOOK_S)

    async def _from_neighbours(self) -> Served | None:
        """The model that was named, or that the room serves, from whoever has it."""
        digest = rooms_digest(self._directory(), self._config.model)
        if not digest:
            return None
        held = model.by_digest(digest, self._store)
        if held is None:
            if trio.current_time() < self._meet_from:
                return None
            try:
                held = await self._fetcher.meet(digest)
            except MeshdError as error:
                self._trouble = error.message
                if isinstance(error, StoreFull | StateError):  # this disk's: the same megabytes would come for nothing
                    self._meet_from = trio.current_time() + RETRY_S
                return None
        return model.named(self._config, self._store) if self._config.model is not None else held

    async def _fetch(self, name: str) -> Served | None:
        self._trouble = f"fetching {name}"
        try:
            await model.fetch(name, self._config.state, lambda line: self._log.emit("pull", level="debug", text=line))
        except MeshdError as error:
            self._failed(error)
        return model.named(self._config, self._store)

    def _failed(self, error: MeshdError) -> None:
        self._trouble = error.message
        self._log.emit("failed", level="error", reason=error.message)

    async def _elect(self, spec: ModelSpec) -> None:
        """Take part in the election of this model's ranges, until cancelled."""
        settings = election_settings(self._config)
        if self._config.layers is not None:
            check_fit(spec, self._config.layers, self._capacity_mb, settings)
        self.electing = Electing(
            self._identity.node_id,
            spec,
            settings,
            epoch=self._identity.epoch,
            pinned=self._config.layers,
            resume=last_range.read(self._config.state, spec.digest),
            keeper=self._keeper,
            links=self._links,
            directory=self._directory,
            log=self._log,
            on_claim=self._on_change,
            remember=lambda layers: last_range.write(self._config.state, spec.digest, layers),
        )
        await self.electing.run()


def rooms_digest(directory: Directory, name: str | None = None) -> str:
    """The model that most peers serve, of those called ``name`` if one is given; "" while none does. Whoever is gone serves
    nothing: a room that changed its model remembers for a while who served the one before."""
    base = stored_name(name) if name is not None else None
    held = [
        member.advert.digest
        for member in directory.peers
        if member.state not in (NodeStatus.DEAD, NodeStatus.LEFT) and member.incompatible is None
        if member.advert.digest and base in (None, stored_name(member.advert.model))
    ]
    return max(sorted(set(held)), key=held.count, default="")
