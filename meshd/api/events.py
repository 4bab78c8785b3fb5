"""``GET /events``: the event log as server-sent events.

Owns the queue of each client: bounded, the oldest events are lost when a client is slow, and it is told how many (``lost``).
``?last=N`` begins with the latest N events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import trio

from meshd.api.message import Request, Writer
from meshd.api.sse import KEEP_ALIVE, SSE_HEADERS, frame
from meshd.errors import CallerError
from meshd.eventlog import EventLog

QUEUE_EVENTS = 256
KEEP_ALIVE_S = 15.0


class EventQueue:
    """One client's events. `put` never waits."""

    def __init__(self, size: int = QUEUE_EVENTS) -> None:
        self._events: deque[Mapping[str, Any]] = deque(maxlen=size)
        self._there = trio.Event()
        self._lost = 0

    def put(self, event: Mapping[str, Any]) -> None:
        """Add an event; the oldest makes room."""
        if len(self._events) == self._events.maxlen:
            self._lost += 1
        self._events.append(event)
        self._there.set()

    async def take(self) -> list[Mapping[str, Any]]:
        """What has come since; waits for the first. Begins with a ``lost`` event if some were lost."""
        await self._there.wait()
        self._there = trio.Event()
        taken = list(self._events)
        self._events.clear()
        if self._lost:
            taken.insert(0, {"ev": "lost", "count": self._lost})
            self._lost = 0
        return taken


async def stream_events(log: EventLog, request: Request, writer: Writer) -> None:
    """Send events until the client leaves."""
    last = _last(request)
    queue = EventQueue()
    for event in list(log.recent)[-last:] if last else ():
        queue.put(event)
    unsubscribe = log.subscribe(queue.put)
    try:
        await writer.start(200, SSE_HEADERS)
        await writer.send(KEEP_ALIVE)
        while True:
            events: list[Mapping[str, Any]] = []
            with trio.move_on_after(KEEP_ALIVE_S):
                events = await queue.take()
            await writer.send(b"".join(frame(event) for event in events) or KEEP_ALIVE)
    finally:
        unsubscribe()


def _last(request: Request) -> int:
    text = request.query.get("last")
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise CallerError("last must be a whole number", param="last")
    return min(int(text), QUEUE_EVENTS)
