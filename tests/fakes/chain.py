"""A chain that says what a test scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from meshd.chain.request import (
    Event,
    Finished,
    GenerationRequest,
    HopReport,
    Recovery,
    RouteUse,
    Started,
    Timings,
    Tokens,
)
from meshd.errors import MeshdError
from meshd.inference.engine import Choice
from meshd.vocabulary import Hop, LayerRange, NodeId, SessionId

N1 = NodeId("1" * 32)
N2 = NodeId("2" * 32)
SESSION = SessionId("5" * 32)
ROUTE = (Hop(N1, LayerRange(0, 15)), Hop(N2, LayerRange(15, 30)))
USE = RouteUse("exploit", "tiny|n1[0:15]->n2[15:30]")


@dataclass
class FakeChain:
    """Answers with ``ids``, cut to what is asked for, ``step`` of them in each event. ``error`` is raised before the id with
    index ``error_at`` (None: at the start, before the request is accepted); at ``hold_at`` it waits for ``release``."""

    ids: tuple[int, ...] = ()
    step: int = 1
    error: MeshdError | None = None
    error_at: int | None = None
    hold_at: int | None = None
    release: trio.Event = field(default_factory=trio.Event)
    recoveries: tuple[Recovery, ...] = ()
    stoppable: bool = True
    requests: list[GenerationRequest] = field(default_factory=list)
    running: int = 0
    stopped: int = 0

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Event]]:
        self.requests.append(request)
        self.running += 1
        try:
            await trio.lowlevel.checkpoint()
            if self.error is not None and self.error_at is None:
                raise self.error
            yield _StoppableEvents(self, request) if self.stoppable else _Events(self, request)
        finally:
            self.running -= 1


class _Events:
    def __init__(self, chain: FakeChain, request: GenerationRequest) -> None:
        self.chain = chain
        self.request = request
        self.at = len(request.forced)
        self.started = False
        self.reason = ""
        self.finished = False

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint()
        if self.finished:
            raise StopAsyncIteration
        if not self.started:
            self.started = True
            return Started(SESSION, ROUTE, USE)
        return await self._tokens() or self._finish()

    async def _tokens(self) -> Tokens | None:
        chain, request = self.chain, self.request
        if self.reason:
            return None
        choices: list[Choice] = []
        while len(choices) < chain.step and not self.reason:
            if self.at >= request.max_tokens or self.at >= len(chain.ids):
                self.reason = "length"
                break
            if self.at == chain.error_at and chain.error is not None:
                if choices:
                    break
                raise chain.error
            if self.at == chain.hold_at:
                await chain.release.wait()
            token = chain.ids[self.at]
            choices.append(self._choice(token))
            self.at += 1
            if token in request.eos_ids:
                self.reason = "stop"
        return Tokens(tuple(choices)) if choices else None

    def _choice(self, token: int) -> Choice:
        wanted = self.request.sampling.logprobs
        position = len(self.request.prompt) + self.at
        if wanted is None:
            return Choice(position, token, token, 17.5)
        top = tuple((token + n, -0.5 - n) for n in range(wanted))
        return Choice(position, token, token, 17.5, -0.5, top)

    def _finish(self) -> Finished:
        self.finished = True
        hops = (HopReport(N1, ROUTE[0].layers, 8.123, 0.4, 2), HopReport(N2, ROUTE[1].layers, 9.0, 0.5, 2))
        return Finished(self.reason, hops, USE, self.chain.recoveries, Timings(31.0, 62.0, 32.1), cached_tokens=2)


class _StoppableEvents(_Events):
    def stop(self) -> None:
        self.reason = "stop"
        self.chain.stopped += 1
