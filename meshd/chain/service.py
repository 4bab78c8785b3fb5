"""The chain of one node: its entry, its relay and the courier between them and the rest of the room.

Composition and dispatch only. The daemon calls `run` in its nursery, hands inbound streams of kind ``chain.*`` to `handle`, and
gives `generate` to the API.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import trio

from meshd.chain.courier import Courier
from meshd.chain.drafts import NgramDrafts
from meshd.chain.entry import Entry, EntryParts, NewDrafts, Notice
from meshd.chain.messages import ChainMessage, ForEntry, Need, Step, Why
from meshd.chain.relay import Relay
from meshd.chain.request import Event, GenerationRequest
from meshd.directory import Directory
from meshd.inference.engine import Engine
from meshd.links.wire import Links, Message, Stream
from meshd.routing.planner import Planner
from meshd.vocabulary import ModelSpec, NodeId, SessionId

MAX_REQUESTS: Final = 64
MAX_RELAYED: Final = 256


def _lookup(_request: GenerationRequest) -> NgramDrafts:
    return NgramDrafts()


class ChainService:
    """One node's part in every chain.

    ``engine`` and ``directory`` give what is true now; ``model`` likewise (default: the engine's), for a node that is an
    entry without layers. ``notice(kind, fields)`` hears of ``route``, ``failover`` and ``recovered``. ``drafts`` makes what
    guesses a request's tokens (None: nothing does); no answer is changed by it.
    ``max_requests`` bounds what is owned here, ``max_relayed`` the sessions with state here, ``max_computing`` those of them that
    have a step in the engine when a new one comes.
    """

    def __init__(
        self,
        self_id: NodeId,
        links: Links,
        *,
        engine: Callable[[], Engine | None],
        planner: Planner,
        directory: Callable[[], Directory],
        model: Callable[[], ModelSpec | None] | None = None,
        rng: random.Random | None = None,
        notice: Notice | None = None,
        max_requests: int = MAX_REQUESTS,
        max_relayed: int = MAX_RELAYED,
        max_computing: int = MAX_RELAYED,
        drafts: NewDrafts | None = _lookup,
    ) -> None:
        self._self = self_id
        self._engine = engine
        self._relay = Relay(
            self_id,
            engine,
            forgotten=self._close_unless_served,
            max_sessions=max_relayed,
            max_computing=max_computing,
        )
        self._entry = Entry(
            EntryParts(
                self_id=self_id,
                links=links,
                planner=planner,
                directory=directory,
                model=model or self._engine_model,
                notice=notice or _unheard,
                rng=rng or random.SystemRandom(),
                max_sessions=max_requests,
                drafts=drafts,
            )
        )
        self._courier = Courier(self_id, links, deliver=self._deliver, lost=self._lost)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once requests can be taken."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._courier.run)
            await nursery.start(self._relay.run, self._courier)
            await nursery.start(self._entry.run, self._courier)
            task_status.started()

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """`chain.request.Chain`: leaving the context cancels the request everywhere."""
        return self._entry.generate(request)

    async def handle(self, node_id: NodeId, first: Message, stream: Stream) -> None:
        """An inbound stream whose first message's kind starts with ``chain.``; returns when it is over."""
        await self._courier.handle(node_id, first, stream)

    @property
    def in_flight(self) -> int:
        """Requests of this node's own clients that run."""
        return self._entry.in_flight

    @property
    def deaf(self) -> bool:
        """True while requests wait for other nodes, and nobody is heard."""
        return self._entry.deaf

    @property
    def sessions(self) -> int:
        """Sessions that this node holds state for, whoever's they are."""
        return self._relay.sessions

    @property
    def running(self) -> int:
        """Those of them that somebody waits for: what a node that leaves lets finish."""
        return self._relay.running

    @property
    def streams(self) -> int:
        """Open chain streams."""
        return self._courier.streams

    @property
    def counters(self) -> Mapping[str, int]:
        """recoveries, replayed_tokens, hedges, failovers."""
        return self._entry.counters

    def _engine_model(self) -> ModelSpec | None:
        engine = self._engine()
        return engine.info.spec if engine else None

    def _deliver(self, source: NodeId, message: ChainMessage) -> None:
        ours = isinstance(message, ForEntry) or (isinstance(message, Need) and message.origin is None)
        if not (ours and self._entry.deliver(source, message)):
            if not self._is_stray(message):
                self._relay.deliver(source, message)
            self._close_unless_served(message.session)

    def _is_stray(self, message: ChainMessage) -> bool:
        """A step of a request of this node's own that is over, or was another run's: nobody waits for what comes of it."""
        return (
            isinstance(message, Step) and message.plan.entry == self._self and not self._entry.serves(message.session)
        )

    def _close_unless_served(self, session: SessionId) -> None:
        """Nobody else will end its streams, once what was answered is out. They are the entry's as well as the hops'."""
        if not (self._relay.serves(session) or self._entry.serves(session)):
            self._courier.close(session)

    def _lost(self, session: SessionId, node: NodeId, why: Why, attempt: int | None) -> None:
        self._entry.lost(session, node, why, attempt)
        self._relay.lost(session, node, why, attempt)


def _unheard(kind: str, fields: Mapping[str, Any]) -> None:
    """Nobody listens."""
