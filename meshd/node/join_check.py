"""What comes of ``--join``: an address that is a node's HTTP port is refused (what people paste, and what would be waited for in
vain), and that nobody answers is told.

The usual HTTP port is refused when the flag is read; of any other port only an answer tells. Asked is what has stayed silent as
a mesh address for `PATIENCE_S` while nobody else of the room was heard, so a join that works costs nothing. A room whose first
node names the others is silent too at first, so silence is no failure.
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
SILENT_S: Final = 5.0
MAX_BYTES: Final = 64 * 1024


class JoinCheck:
    """``heard``: somebody of the room has answered; ``tell`` is called once if nobody has in `SILENT_S`."""

    def __init__(self, endpoints: Sequence[Endpoint], heard: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self._endpoints = endpoints
        self._heard = heard
        self._tell = tell
        self._silent = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """That nobody is heard, for as long as it is so."""
        return (self._silence(),) if self._silent and not self._heard() else ()

    async def run(self) -> None:
        """Raises UsageError naming the mesh port where an HTTP port was given."""
        if not self._endpoints:
            return
        silent_at = trio.current_time() + SILENT_S
        await trio.sleep(PATIENCE_S)
        for endpoint in self._endpoints:
            if self._heard():
                return
            await _refuse_http_port(endpoint)
        await trio.sleep_until(silent_at)
        self._silent = not self._heard()
        if self._silent:
            self._tell(self._silence())

    def _silence(self) -> str:
        where = ", ".join(map(str, self._endpoints))
        return (  # a node with another mesh key does not answer at all
            f"nobody answers at {where} (--join); they are asked on. Is a node there, is its mesh port open for UDP and TCP,"
            " and does `meshd key show` say the same on both?"
        )


async def _refuse_http_port(endpoint: Endpoint) -> None:
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
