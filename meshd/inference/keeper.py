"""Keeps this node's stage running: carries out LOAD and DROP, and notices when an engine dies.

Owns the engines of this node (one that serves, at most one beside it) and ``generation``, which counts starts, so that a verdict
or a step for an earlier engine is never taken for this one. Which layers, and when, is the elector's decision; what
happened is reported back to it through `Reports`.

A crash is not the node's death: the layers go and come back. An engine that lives but stays in one computation for two minutes
(chunks are cut to take half a second, `batch.STALL_MS`) has crashed too: a thread that waits for ever answers every ping.
Loads after a crash are spaced 0.5 s, 1 s, 2 s … 30 s; an engine that ran for a minute starts the row again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from meshd.errors import MeshdError
from meshd.inference.engine import Engine, EngineHealth
from meshd.vocabulary import LayerRange, Loading

FIRST_PAUSE_S: Final = 0.5
LAST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
WATCH_S: Final = 0.1
HANGS_S: Final = 120.0


class Loader(Protocol):
    """Starts an engine that holds ``layers`` and proves it; reports (stage, 0..1) meanwhile. Raises MeshdError."""

    def __call__(
        self, layers: LayerRange, generation: int, progress: Callable[[str, float], None]
    ) -> Awaitable[Engine]: ...


class Reports(Protocol):
    """What the elector wants to hear. With its layers, as a report may be of what was decided otherwise in the meantime."""

    def progressed(self, progress: float) -> None: ...

    def loaded(self, layers: LayerRange) -> None: ...

    def failed(self, layers: LayerRange, reason: str) -> None: ...

    def dropped(self, layers: LayerRange) -> None: ...

    def lost(self, layers: LayerRange, reason: str) -> None: ...


class Nobody:
    """Reports that nobody wants: a node that only serves what it is told once."""

    def progressed(self, progress: float) -> None:
        """Unheard."""

    def loaded(self, layers: LayerRange) -> None:
        """Unheard."""

    def failed(self, layers: LayerRange, reason: str) -> None:
        """Unheard."""

    def dropped(self, layers: LayerRange) -> None:
        """Unheard."""

    def lost(self, layers: LayerRange, reason: str) -> None:
        """Unheard."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the keeper shows: ``state`` is observer, loading, proving, ready or failed. ``layers`` are those that serve."""

    state: str
    reason: str = ""
    layers: LayerRange | None = None
    loading: Loading | None = None


OBSERVER: Final = Held("observer")


@dataclass(slots=True)
class _Watched:
    """An engine as it was seen last, and how long it has been in what it computes: only what was watched counts, since a device
    that slept, or a daemon that was stopped, says nothing of its engine."""

    engine: Engine
    at: float
    since: float
    tick: int = -1
    busy_s: float = 0.0

    def see(self, health: EngineHealth, now: float) -> None:
        busy = health.busy_ms > 0.0 and health.tick == self.tick
        self.busy_s = self.busy_s + min(now - self.at, 2 * WATCH_S) if busy else 0.0
        self.tick, self.at = health.tick, now

    @property
    def fault(self) -> str:
        return f"the engine worker has been in one computation for {HANGS_S:g} s" if self.busy_s > HANGS_S else ""


class StageKeeper:
    """Run it in a nursery; tell it `load` and `drop`. ``on_change`` is called after every change of what is held."""

    def __init__(self, start: Loader, on_change: Callable[[], None]) -> None:
        self._start = start
        self._on_change = on_change
        self._reports: Reports = Nobody()
        self._beside: Engine | None = None
        self._wanted: LayerRange | None = None  # being loaded
        self._layers: LayerRange | None = None  # serving
        self._loading: Loading | None = None
        self._reason = ""
        self._pause_s = 0.0
        self._work_put, self._work = trio.open_memory_channel[tuple[str, LayerRange]](16)
        self._loading_scope: trio.CancelScope | None = None
        self.engine: Engine | None = None
        self.generation = 0
        self.held = OBSERVER

    def report_to(self, reports: Reports) -> None:
        """Who decides. Set before `run`."""
        self._reports = reports

    def load(self, layers: LayerRange) -> None:
        """LOAD: start an engine for these layers, beside the one that serves if there is one."""
        self._work_put.send_nowait(("load", layers))

    def drop(self, layers: LayerRange) -> None:
        """DROP: stop serving these layers; if others were loaded beside them, those serve from now on."""
        if self._wanted == layers and self._loading_scope is not None:
            self._loading_scope.cancel()
        self._work_put.send_nowait(("drop", layers))

    async def run(self) -> None:
        """Until cancelled; closes the engines on the way out."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                async for what, layers in self._work:
                    await (self._load(layers) if what == "load" else self._drop(layers))
        finally:
            with trio.CancelScope(shield=True):
                for engine in (self.engine, self._beside):
                    if engine is not None:
                        await engine.aclose()

    # --- LOAD and DROP ------------------------------------------------------------------------------------------------

    async def _load(self, layers: LayerRange) -> None:
        if self._has(layers):
            self._layers = layers
            self._show()
            self._reports.loaded(layers)
            return
        self._wanted, self._reason = layers, ""
        refused = ""  # of this load alone: another engine may die meanwhile
        try:
            with trio.CancelScope() as self._loading_scope:
                engine = await self._started(layers)
                self._take(engine, layers)
        except MeshdError as error:
            self._reason = refused = error.message
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
        given_up = self._loading_scope is not None and self._loading_scope.cancelled_caught
        self._wanted, self._loading, self._loading_scope = None, None, None
        self._show()
        if given_up:
            return  # the drop that said so reports
        if refused:
            self._reports.failed(layers, refused)
        else:
            self._reports.loaded(layers)

    def _has(self, layers: LayerRange) -> bool:
        """A part of what is loaded, which can serve at once, as it is more or less of what serves. One that is both, of an engine
        that offers less than it holds, would give up layers before their drop."""
        if self.engine is None or self._layers is None:
            return False
        return self.engine.info.layers.covers(layers) and (layers.covers(self._layers) or self._layers.covers(layers))

    async def _started(self, layers: LayerRange) -> Engine:
        self.generation += 1
        self._progress("loading", 0.0)
        await trio.sleep(self._pause_s)
        return await self._start(layers, self.generation, self._progress)

    def _take(self, engine: Engine, layers: LayerRange) -> None:
        if self.engine is None:
            self.engine, self._layers = engine, layers
        else:
            self._beside = engine
        self._reason = ""

    async def _drop(self, layers: LayerRange) -> None:
        gone: Engine | None = None
        if self._layers == layers and self.engine is not None:
            gone, self.engine, self._beside = self.engine, self._beside, None
            self._layers = self.engine.info.layers if self.engine is not None else None
        elif self._beside is not None and self._beside.info.layers == layers:
            gone, self._beside = self._beside, None
        self._show()  # nobody is sent here for them any more
        if gone is not None:
            await gone.aclose()
        self._reports.dropped(layers)

    # --- what happens -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Notice an engine that died or hangs."""
        watched: _Watched | None = None
        while True:
            await trio.sleep(WATCH_S)
            engine, now = self.engine, trio.current_time()
            if engine is None:
                watched = None
                continue
            if watched is None or watched.engine is not engine:
                watched = _Watched(engine, now, since=now)
            health = engine.health()
            watched.see(health, now)
            if health.alive and not watched.fault:
                if now - watched.since > STEADY_S:
                    self._pause_s = 0.0
                continue
            self._reason = watched.fault if health.alive else health.reason or "the engine worker died"
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            lost, reason = self._layers or engine.info.layers, self._reason
            self.engine, self._layers = self._beside, self._beside.info.layers if self._beside else None
            self._beside = None
            self._show()
            await engine.aclose()
            self._reports.lost(lost, reason)

    def _progress(self, stage: str, share: float) -> None:
        if self._wanted is not None:
            self._loading = Loading(self._wanted, stage, round(min(max(share, 0.0), 1.0), 2))
            self._show()
            self._reports.progressed(max(self._loading.progress, 0.001))

    def _show(self) -> None:
        held = self._as_held()
        if held != self.held:
            self.held = held
            self._on_change()

    def _as_held(self) -> Held:
        if self.engine is not None:
            return Held("ready", layers=self._layers, loading=self._loading)
        if self._loading is not None:
            return Held("proving" if self._loading.stage == "proving" else "loading", loading=self._loading)
        return Held("failed", self._reason) if self._reason else OBSERVER
