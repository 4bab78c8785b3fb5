"""This node's part in admission: what it proves of itself, whom it probes, what it answers to probes. Composition.

One object for the daemon: `verdict` goes to the roster, `proving` around the loader, `serve` gets streams whose kind begins with
``probe``, `look` is called when the room changed, `consider` when a prefill has begun.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from meshd.admission.book import VerdictBook
from meshd.admission.probe_server import ProbeServer
from meshd.admission.prober import Prober
from meshd.admission.spot_check import SpotChecker
from meshd.directory import Directory
from meshd.eventlog import EventLog
from meshd.inference.engine import Engine
from meshd.inference.keeper import Loader
from meshd.links.wire import Links, Message, Stream
from meshd.models.store import ModelStore
from meshd.node.expectations import Expectations
from meshd.node.fetcher import Fetcher
from meshd.node.model import Served
from meshd.node.proving import ProvingLoader
from meshd.vocabulary import Advert, NodeId, Route

PREFIX: Final = "probe"


class Admitting:
    """Run it in a nursery. ``enabled`` is ``--admit``; ``on_verdict`` is called when a verdict changed."""

    def __init__(
        self,
        node_id: NodeId,
        store: ModelStore,
        links: Links,
        fetcher: Fetcher,
        *,
        enabled: bool,
        served: Callable[[], Served | None],
        engine: Callable[[], Engine | None],
        directory: Callable[[], Directory],
        log: EventLog,
        on_verdict: Callable[[], None],
    ) -> None:
        self._node_id, self._enabled, self._log = node_id, enabled, log
        self._rng = random.SystemRandom()  # which prompts: nobody should know beforehand
        self._expectations = Expectations(
            store, served, fetcher.qspec, lambda text: log.emit("qspec", level="warning", text=text)
        )
        self._book = VerdictBook(node_id, enabled=enabled)
        self._server = ProbeServer(engine)
        self._prober = Prober(
            self._book,
            links,
            directory=directory,
            digest=lambda: _digest(served()),
            expectations=self._expectations,
            rng=self._rng,
            on_verdict=on_verdict,
            on_event=lambda name, fields: log.emit(name, **fields),
        )
        self._spots = SpotChecker(
            node_id,
            links,
            engine=engine,
            directory=directory,
            quarantine=self._prober.quarantine,
            doubt=self._prober.doubt,
            rng=self._rng,
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._prober.run)
            nursery.start_soon(self._expectations.run)
            nursery.start_soon(self._spots.run)

    def verdict(self, advert: Advert) -> tuple[bool | None, str]:
        """`Roster.verdict`."""
        return self._book.verdict(advert)

    def look(self) -> None:
        """The room may have changed."""
        self._prober.look()

    def quarantine(self, node: NodeId, reason: str) -> None:
        """A node sent rows that no honest stage makes."""
        self._prober.quarantine(node, reason)

    def consider(self, ids: Sequence[int], route: Route) -> None:
        """A prefill has begun: one in a hundred is computed twice."""
        if self._enabled:
            self._spots.consider(ids, route)

    def proving(self, load: Loader) -> ProvingLoader:
        """``load``, and the engine proven before it counts as loaded."""
        return ProvingLoader(
            load,
            self._node_id,
            self._expectations,
            enabled=self._enabled,
            rng=self._rng,
            log=lambda text: self._log.emit("unproven", level="warning", text=text),
        )

    async def serve(self, peer: NodeId, message: Message, stream: Stream) -> None:
        """A stream of a peer that probes this node. Raises what to end it with."""
        await self._server.serve(peer, message, stream)

    @property
    def counters(self) -> Mapping[str, int]:
        """For ``/status``."""
        return {**self._prober.counters, **self._spots.counters, "probes_answered": self._server.answered}


def _digest(served: Served | None) -> str:
    return served.spec.digest if served is not None else ""
