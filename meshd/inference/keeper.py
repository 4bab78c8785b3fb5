"""Keeps one stage running: loads what is wanted, restarts what died, gives the old one time to empty.

Owns the life of this node's engine and its ``generation`` (which counts starts, so that a verdict or a step for an earlier
engine is never taken for this one). Does not decide which layers: whoever elects or pins them calls `want`.

A crash is not the node's death: the room sees the layers go and come back. Restarts are spaced 0.5 s, 1 s, 2 s … 30 s; an engine
that ran for a minute starts the row again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from meshd.errors import MeshdError
from meshd.inference.engine import Engine
from meshd.vocabulary import LayerRange, Loading

FIRST_PAUSE_S: Final = 0.5
LAST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
WATCH_S: Final = 0.2


class Loader(Protocol):
    """Starts an engine that holds ``layers``; reports (stage, 0..1) meanwhile. Raises MeshdError."""

    def __call__(
        self, layers: LayerRange, generation: int, progress: Callable[[str, float], None]
    ) -> Awaitable[Engine]: ...


@dataclass(frozen=True, slots=True)
class Held:
    """What the keeper shows: ``state`` is one of observer, loading, ready, failed."""

    state: str
    reason: str = ""
    layers: LayerRange | None = None
    loading: Loading | None = None


OBSERVER: Final = Held("observer")


class StageKeeper:
    """Run it in a nursery; call `want` from anywhere. ``on_change`` is called after every change of what is held."""

    def __init__(self, load: Loader, on_change: Callable[[], None]) -> None:
        self._load = load
        self._on_change = on_change
        self._wanted: LayerRange | None = None
        self._changed = trio.Event()
        self.engine: Engine | None = None
        self.generation = 0
        self.held = OBSERVER

    def want(self, layers: LayerRange | None) -> None:
        """Hold these layers from now on (None: none). The same as now changes nothing."""
        if layers != self._wanted:
            self._wanted = layers
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled; closes the engine on the way out."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                self._changed = trio.Event()
                layers = self._wanted
                if layers is None:
                    await self._unload()
                    self._show(OBSERVER)
                    await self._changed.wait()
                    continue
                began = trio.current_time()
                reason = await self._serve(layers)
                if reason is None:
                    pause_s = FIRST_PAUSE_S
                    continue
                if trio.current_time() - began > STEADY_S:
                    pause_s = FIRST_PAUSE_S
                self._show(Held("failed", reason))
                with trio.move_on_after(pause_s):
                    await self._changed.wait()
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        finally:
            with trio.CancelScope(shield=True):
                await self._unload()

    async def _serve(self, layers: LayerRange) -> str | None:
        """Load and stay while all is well. Why it ended; None when something else is wanted."""

        def progress(stage: str, share: float) -> None:
            self._show(Held("loading", loading=Loading(layers, stage, round(min(max(share, 0.0), 1.0), 2))))

        await self._unload()
        self.generation += 1
        progress("loading", 0.0)
        try:
            self.engine = await self._load(layers, self.generation, progress)
        except MeshdError as error:
            return error.message
        self._show(Held("ready", layers=layers))
        while self._wanted == layers:
            health = self.engine.health()
            if not health.alive:
                await self._unload()
                return health.reason or "the engine worker died"
            with trio.move_on_after(WATCH_S):
                await self._changed.wait()
        return None

    async def _unload(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.aclose()

    def _show(self, held: Held) -> None:
        if held != self.held:
            self.held = held
            self._on_change()
