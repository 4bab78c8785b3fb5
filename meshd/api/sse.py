"""Server-sent events: every event is ``data: `` + one JSON document + a blank line, nothing else.

The stream starts with its first event, so whatever fails before is still answered with a status.
"""

from __future__ import annotations

from typing import Any

from meshd.api.message import Headers, Writer, dump_json
from meshd.errors import MeshdError

SSE_HEADERS: Headers = (("Content-Type", "text/event-stream; charset=utf-8"), ("X-Accel-Buffering", "no"))
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"


def frame(document: Any) -> bytes:
    """One event."""
    return b"data: " + dump_json(document) + b"\n\n"


async def send_error(writer: Writer, error: MeshdError) -> None:
    """The event that ends a stream that failed after its start; the status line is out, so the status goes with it."""
    await writer.send(frame({"error": {**error.json(), "status": error.status}}))
