"""The event log: one line per decision, on stdout, to subscribers (SSE, tests) and in a short memory of the latest.

Owns the form of an event: ``ev`` (what), ``node`` and ``name`` (whom it is about; this node where nothing else is said), ``t``
(wall clock, for people only; nothing in meshd compares it), and plain fields. Never prompts, answers or residuals.

Serving matters more than telling: a line that the output does not take now (a full disk, a terminal that was stopped, a pipe that
nobody reads) is lost, and how many were is said once it takes lines again.
"""

from __future__ import annotations

import errno
import json
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from meshd.vocabulary import NodeId

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
REMEMBERED: Final = 256

Event = Mapping[str, Any]
Subscriber = Callable[[Event], None]


class EventLog:
    """Writes events and hands them on. A subscriber must not block and must not raise. ``label``: what the room calls this node,
    which is more than its name where another has the same."""

    def __init__(
        self,
        node_id: NodeId,
        name: str,
        *,
        form: str = "text",
        level: str = "info",
        out: TextIO | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._node_id = node_id
        self.label: Callable[[], str] = lambda: name
        self._form = form
        self._least = LEVELS[level]
        self._out = out
        self._wall_clock = wall_clock
        self._mute = False
        self._lost_lines = 0
        self._subscribers: dict[object, Subscriber] = {}
        self.recent: deque[Event] = deque(maxlen=REMEMBERED)

    def emit(
        self, ev: str, *, level: str = "info", node: NodeId | None = None, name: str | None = None, **fields: Any
    ) -> None:
        """One event. ``fields`` are JSON plain. The level decides what is written; subscribers get everything but debug, so
        that a quiet log blinds neither the dashboard nor the metrics."""
        event: dict[str, Any] = {
            "ev": ev,
            "node": node or self._node_id,
            "name": name or (self.label() if node in (None, self._node_id) else str(node)[:8]),
            "t": round(self._wall_clock(), 3),
            **fields,
        }
        if level != "info":
            event["level"] = level
        if LEVELS[level] >= self._least:
            self._write(event)
        if level == "debug":
            return
        self.recent.append(event)
        for subscriber in list(self._subscribers.values()):
            subscriber(event)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Be handed every event from now on; call what is returned to stop."""
        token = object()
        self._subscribers[token] = subscriber

        def unsubscribe() -> None:
            self._subscribers.pop(token, None)

        return unsubscribe

    def _write(self, event: Event) -> None:
        if self._mute:
            return
        out = self._out if self._out is not None else sys.stdout
        if not takes(out):
            self._lost_lines += 1
            return
        try:
            out.write(_spelt_for(out, self._with_loss(event) + self._line(event)))
            out.flush()
            self._lost_lines = 0
        except OSError as error:
            self._lost_lines += 1
            self._mute = error.errno == errno.EPIPE  # who read it is gone for good; a disk may have room again
        except ValueError:  # a closed file
            self._mute = True

    def _with_loss(self, event: Event) -> str:
        """The line before this event's, where lines were lost since the last one that was written."""
        if not self._lost_lines:
            return ""
        lost = {"ev": "lost", "node": self._node_id, "name": self.label(), "t": event["t"], "level": "warning"}
        return self._line({**lost, "text": f"{self._lost_lines} lines: the output did not take them"})

    def _line(self, event: Event) -> str:
        return (json.dumps(event, default=str) if self._form == "json" else _text(event)) + "\n"


def takes(stream: TextIO) -> bool:
    """Whether a line (up to the 4 KiB of a pipe's page) can be written without waiting. What cannot be asked is believed to."""
    try:
        asked = select.poll()
        asked.register(stream.fileno(), select.POLLOUT)
        return bool(asked.poll(0))
    except (OSError, ValueError, AttributeError):
        return True


def _spelt_for(stream: TextIO, text: str) -> str:
    """``text`` with what the stream cannot spell escaped. Refused, it would look like a closed file. JSON is ASCII anyway."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _text(event: Event) -> str:
    """``ready n1 smollm2-135m 0..15 http://…``: the ``text`` field if the event has one, else its fields."""
    head = f"{event['ev']} {event['name']}"
    if "text" in event:
        return f"{head} {event['text']}"
    rest = " ".join(
        f"{key}={value}"
        for key, value in event.items()
        if key not in ("ev", "node", "name", "t") and value not in (None, "")
    )
    return f"{head} {rest}".rstrip()
