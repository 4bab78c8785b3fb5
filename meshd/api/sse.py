"""Server-sent events: every event is ``data: `` + one JSON document + a blank line, nothing else.

The stream starts with its first event, so whatever fails before is still answered with a status.
"""

from __future__ import annotations

from typing import Any

from meshd.api.message import Headers, Writer, dump_json
from meshd.errors import MeshdError

_TYPE = "text/event-stream"
SSE_HEADERS: Headers = (("Content-Type", f"{_TYPE}; charset=utf-8"), ("X-Accel-Buffering", "no"))
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"


def frame(document: Any) -> bytes:
    """One event."""
    return b"data: " + dump_json(document) + b"\n\n"


def are_events(headers: Headers) -> bool:
    """True for the headers of a stream of events."""
    return any(name.lower() == "content-type" and value.startswith(_TYPE) for name, value in headers)


async def send_error(writer: Writer, error: MeshdError) -> None:
    """The event that ends a stream that failed after its start; the status line is out, so the status goes with it."""
    await writer.send(frame({"error": {**error.json(), "status": error.status}}))
