"""The engine and the chain as they are, with what passes through them counted and timed.

Both stand where the real one would, so neither knows that it is measured.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from meshd.chain.request import Chain, Event, Finished, GenerationRequest, Started, Stoppable, Tokens
from meshd.errors import MeshdError
from meshd.inference.engine import Engine, EngineHealth, EngineInfo, Opening, Ran, Run, Settle, submitting
from meshd.metrics.instruments import Instruments
from meshd.vocabulary import LayerRange, SessionId

OnAnswer = Callable[[Started, Finished, int], None]
"""What is done with a finished answer: its start, its end, how many tokens."""

_MS: Final = 0.001


class MeasuredEngine:
    """An `Engine` whose steps are counted."""

    def __init__(self, engine: Engine, instruments: Instruments) -> None:
        self._engine = engine
        self._instruments = instruments

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def health(self) -> EngineHealth:
        return self._engine.health()

    async def run(self, run: Run) -> Ran:
        """The engine's, counted by phase: positions below the prompt's end are prefill, whoever computes them again."""
        try:
            ran = await self._engine.run(run)
        except MeshdError as error:
            self._count(run, error)
            raise
        self._count(run, ran)
        return ran

    def submit(self, run: Run, settle: Settle) -> Callable[[], None] | None:
        """`Submitting`, where the engine is."""
        engine = submitting(self._engine)
        if engine is None:
            return None

        def counted(result: Ran | MeshdError) -> None:
            self._count(run, result)
            settle(result)

        return engine.submit(run, counted)

    def _count(self, run: Run, ran: Ran | MeshdError) -> None:
        if isinstance(ran, MeshdError):
            self._instruments.refused.labels(ran.code).inc()
            return
        prefill = max(0, min(run.start + run.n, run.prompt_len) - run.start)
        for counter, rows in ((self._instruments.prefill, prefill), (self._instruments.decode, run.n - prefill)):
            if rows:
                counter.inc(rows * len(run.layers))
        self._instruments.hop_compute_s.observe(ran.compute_ms * _MS)
        self._instruments.hop_queue_s.observe(ran.queue_ms * _MS)
        self._instruments.batch_sessions.observe(ran.batch)

    async def boundary(self, session: SessionId, layers: LayerRange, start: int, end: int) -> bytes:
        return await self._engine.boundary(session, layers, start, end)

    async def open(self, opening: Opening) -> int:
        return await self._engine.open(opening)

    def drop(self, session: SessionId) -> None:
        self._engine.drop(session)

    async def forward(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        return await self._engine.forward(layers, rows, n)

    async def lm_head(self, rows: bytes, n: int) -> bytes:
        return await self._engine.lm_head(rows, n)

    async def aclose(self) -> None:
        await self._engine.aclose()


class MeasuredChain:
    """A `Chain` whose answers are timed. ``on_answer`` hears of each that finished."""

    def __init__(self, chain: Chain, instruments: Instruments, on_answer: OnAnswer) -> None:
        self._chain = chain
        self._instruments = instruments
        self._on_answer = on_answer

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Event]]:
        """The chain's."""
        began, outcome = trio.current_time(), "cancelled"
        self._instruments.prompt_tokens.inc(len(request.prompt))
        try:
            async with self._chain.generate(request) as events:
                kind = _StoppableAnswer if isinstance(events, Stoppable) else _Answer
                answer = kind(events, self._instruments, self._on_answer, began)
                yield answer
            outcome = answer.outcome
        except MeshdError as error:
            outcome = error.code
            raise
        finally:
            self._instruments.requests.labels(outcome).inc()
            self._instruments.request_s.observe(trio.current_time() - began)


class _Answer:
    """One answer's events, timed as they pass."""

    def __init__(self, events: Any, instruments: Instruments, on_answer: OnAnswer, began: float) -> None:
        self._events = events
        self._instruments = instruments
        self._on_answer = on_answer
        self._last = began
        self._tokens = 0
        self._started: Started | None = None
        self.outcome = "cancelled"

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event: Event = await anext(self._events)
        match event:
            case Started():
                self._started = event
            case Tokens():
                self._timed(len(event.choices))
            case Finished():
                self.outcome = "finished"
                self._told(event)
        return event

    def _timed(self, count: int) -> None:
        """``count`` tokens came at once: each after an equal part of the wait."""
        now = trio.current_time()
        if not count:
            return
        waits = [(now - self._last) / count] * count
        if not self._tokens:
            self._instruments.first_token_s.observe(now - self._last)
            waits = waits[1:]
        for wait in waits:
            self._instruments.inter_token_s.observe(wait)
        self._last = now
        self._tokens += count
        self._instruments.answer_tokens.inc(count)

    def _told(self, finished: Finished) -> None:
        for hop in finished.route:
            self._instruments.hop_wire_s.observe(hop.wire_ms * _MS)
        for recovery in finished.recoveries:
            self._instruments.stall_s.labels(recovery.reason).observe(recovery.stall_ms * _MS)
        if self._started is not None:
            self._on_answer(self._started, finished, self._tokens)


class _StoppableAnswer(_Answer):
    def stop(self) -> None:
        """`Stoppable`: passed on."""
        self._events.stop()
