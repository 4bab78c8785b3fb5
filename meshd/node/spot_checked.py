"""A chain whose requests are looked at as they begin, so that some of them are spot-checked.

Owns nothing but the passing on of events: the answer is the chain's own, stopped and cancelled as it would be without this.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from meshd.chain.request import Chain, Event, GenerationRequest, Started, Stoppable
from meshd.vocabulary import Route


class SpotChecked:
    """Implements `chain.request.Chain`. ``consider(ids, route)`` must neither wait nor fail."""

    def __init__(self, chain: Chain, consider: Callable[[Sequence[int], Route], None]) -> None:
        self._chain = chain
        self._consider = consider

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """As the chain's; leaving the context cancels the request everywhere."""
        return self._generate(request)

    @asynccontextmanager
    async def _generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Event]]:
        async with self._chain.generate(request) as events:
            yield _Seen(events, lambda route: self._consider(request.prompt, route))


class _Seen:
    """The events, and a look at the first."""

    def __init__(self, events: AsyncIterator[Event], on_route: Callable[[Route], None]) -> None:
        self._events = events
        self._on_route = on_route

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        if isinstance(event, Started):
            self._on_route(event.route)
        return event

    def stop(self) -> None:
        """`Stoppable`, where the chain's own events are."""
        if isinstance(self._events, Stoppable):
            self._events.stop()
