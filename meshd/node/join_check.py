"""Refuses a ``--join`` address that is a node's HTTP port: what people paste, and what would be waited for in vain.

The usual HTTP port is refused when the flag is read; of any other port only an answer tells. Asked is what has stayed silent as
a mesh address for `PATIENCE_S` while nobody else of the room was heard, so a join that works costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

import trio

from meshd.config import MESH_PORT
from meshd.errors import UsageError
from meshd.vocabulary import Endpoint

PATIENCE_S: Final = 1.0
ANSWER_S: Final = 2.0
MAX_BYTES: Final = 64 * 1024


async def refuse_http_ports(endpoints: Sequence[Endpoint], heard: Callable[[], bool]) -> None:
    """Raises UsageError naming the mesh port. ``heard``: somebody of the room has answered."""
    if not endpoints:
        return
    await trio.sleep(PATIENCE_S)
    for endpoint in endpoints:
        if heard():
            return
        answer = await _ask(endpoint)
        if answer.startswith(b"HTTP/1."):
            port = mesh_port_untrusted(answer)
            mesh = f"{endpoint.host}:{MESH_PORT} by default" if port is None else str(Endpoint(endpoint.host, port))
            raise UsageError(f"--join: {str(endpoint)!r} is an HTTP port; give the mesh port, {mesh}")


def mesh_port_untrusted(answer: bytes) -> int | None:
    """The mesh port that a node's ``/status`` tells; None when it tells none."""
    try:
        document = json.loads(answer.partition(b"\r\n\r\n")[2])
        return Endpoint.parse(document["mesh"], MESH_PORT).port
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


async def _ask(endpoint: Endpoint) -> bytes:
    """What answers an HTTP request there; b"" when nothing does, or not in time."""
    got = b""
    with trio.move_on_after(ANSWER_S):
        try:
            async with await trio.open_tcp_stream(endpoint.host, endpoint.port) as stream:
                host = str(endpoint).encode("ascii", "replace")
                await stream.send_all(b"GET /status HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
                async for data in stream:
                    got += data
                    if len(got) > MAX_BYTES:
                        break
        except (OSError, trio.BrokenResourceError):
            pass  # nobody is there: gossip goes on asking
    return got
