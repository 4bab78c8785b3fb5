"""What the API needs of the node it speaks for: the only thing the daemon builds for it.

Everything that changes is a callable, read at each request; nothing here is cached by the API.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from meshd.api.message import Request, Response, Writer
from meshd.chain.request import Chain
from meshd.directory import Directory
from meshd.eventlog import EventLog
from meshd.inference.engine import Engine
from meshd.inference.text import Text
from meshd.vocabulary import Health, ModelSpec


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What this node knows of itself beside its advert. ``state``: starting, loading, proving, ready, draining, observer or
    failed, with the ``reason``. ``mesh``: where gossip and links listen. ``mesh_ids``: the public names of the mesh keys in use,
    the one that sends first; a rotation waits for them. ``owned``: requests that this node answers itself; ``relayed``:
    sessions that run through its layers. A drained node has neither, though it may still pass requests on."""

    state: str = "starting"
    reason: str = ""
    name: str = ""
    version: str = ""
    uptime_s: float = 0.0
    kv_sessions: int = 0
    owned: int = 0
    relayed: int = 0
    mdns: str = "off"
    mesh: str = ""
    mesh_ids: tuple[str, ...] = ()
    deterministic: bool = True
    warnings: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    health: Health = field(default_factory=Health)


class PassOn(Protocol):
    """Lets an entry of the room answer. ``digest`` names the model it must serve ("": this node's), ``deadline_s`` the time that
    the client gives. It raises NoOtherEntry when there is no such entry, NotReady when none of them answered or the one that
    had begun a stream is gone, and DeadlineExceeded when the answer is not whole in time; the request it hands over is marked
    ``passed_on``, and the entry's `App.take_over` answers it."""

    async def __call__(
        self, request: Request, writer: Writer, *, digest: str, deadline_s: float | None
    ) -> Response | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """``text`` and ``spec`` are None while this node cannot own requests (no tokenizer yet, draining, failed): then they are
    passed on. ``deaf``: requests wait for other nodes and nobody is heard. ``drain`` and ``resume`` return once begun. ``sticky``
    is the default of the request's ``kv``; ``rng`` draws the seeds of requests without one."""

    chain: Chain
    directory: Callable[[], Directory]
    facts: Callable[[], NodeFacts]
    text: Callable[[], Text | None] = lambda: None
    spec: Callable[[], ModelSpec | None] = lambda: None
    engine: Callable[[], Engine | None] = lambda: None
    routing: Callable[[str | None], Mapping[str, Any]] = lambda _model: {"config": {}, "models": {}}
    events: EventLog
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    drain: Callable[[], Awaitable[None]]
    resume: Callable[[], Awaitable[None]]
    pass_on: PassOn | None = None
    deaf: Callable[[], bool] = lambda: False
    sticky: bool = True
    rng: random.Random = field(default_factory=random.SystemRandom)
