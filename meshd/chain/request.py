"""What a client of the chain asks for and what it gets: the contract between `api` and `chain`.

Ids only: text, templates and stop strings are the API's business. The event stream is: `Started`, any number of `Tokens`,
then exactly one `Finished`, or an exception from `meshd.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from meshd.inference.engine import Choice, Sampling
from meshd.vocabulary import LayerRange, NodeId, Route, SessionId


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``forced`` are ids already received by the client (`resume`): taken as generated, never sent again, counted in
    ``max_tokens``. ``pinned`` are node ids in order. ``deadline_s`` is None for no total deadline, ``token_deadline_s``
    bounds the wait for each next token. ``eos_ids`` end the answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: frozenset[int] = frozenset()
    forced: tuple[int, ...] = ()
    pinned: tuple[NodeId, ...] = ()
    sticky: bool = True  # False: each token is a new session over a fresh route
    deadline_s: float | None = 60.0
    token_deadline_s: float = 60.0
    tenant: str = ""
    drafts: bool = True  # False: nothing is guessed; the answer is the same, only its speed is not


@dataclass(frozen=True, slots=True)
class HopReport:
    """One stage of the route as it ran: mean per token. ``wire_ms`` is what the hop's time was not compute."""

    node_id: NodeId
    layers: LayerRange
    compute_ms: float = 0.0
    wire_ms: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """One stage replaced while the answer ran. ``reason``: reset, silent, slow, drain, full. ``exact``: same arithmetic."""

    layers: LayerRange
    from_node: NodeId
    to_node: NodeId
    reason: str
    stall_ms: float
    replayed_tokens: int
    exact: bool


@dataclass(frozen=True, slots=True)
class RouteUse:
    """Why this route: ``mode`` cold, scout, exploit, pinned or greedy-fallback."""

    mode: str
    signature: str


@dataclass(frozen=True, slots=True)
class Timings:
    """``ttft_ms`` from the request's arrival; ``tokens_per_s`` over the tokens after the first, of a single one over all."""

    ttft_ms: float
    total_ms: float
    tokens_per_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted and has a route: the one it begins on (recoveries may change it)."""

    session: SessionId
    route: Route = ()
    routing: RouteUse | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens in order. An end token is included (the API leaves it out of text)."""

    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """``reason``: stop (an end token) or length. ``prompt_tokens`` and ``cached_tokens`` as usage reports them."""

    reason: str
    route: tuple[HopReport, ...]
    routing: RouteUse
    recoveries: tuple[Recovery, ...]
    timings: Timings
    cached_tokens: int = 0


Event = Started | Tokens | Finished


@runtime_checkable
class Stoppable(Protocol):
    """What the event stream of `Chain.generate` should also be: an answer that ended for a reason only the API can see (a
    stop string) is finished with its report, not cancelled."""

    def stop(self) -> None:
        """No more tokens are wanted: the next event is `Finished`, reason ``stop``. Never waits, never fails."""
        ...


class Chain(Protocol):
    """The entry's service. Leaving the context cancels the request everywhere."""

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]: ...
