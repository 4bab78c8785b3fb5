"""The HTTP server: listeners, the count of connections, and a shutdown that always ends.

An own shell of h11 on trio. General servers leave something out that this program cannot do without: a limit on connections
and bodies, a handler that is cancelled when its client leaves, and a shutdown that finishes while one client does not read.

What a request means is the application's business (`Application`); one connection's life is in `connection.py`.
Errors: `LocalError` when an address cannot be bound.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Sequence

import trio

from meshd.api.connection import LAST_WORDS_S, Application, Connection
from meshd.api.limits import Budget, Limits
from meshd.errors import LocalError
from meshd.vocabulary import Endpoint

_log = logging.getLogger(__name__)

_PLACE_S = 1.0  # how long a request waits for a place; a silent connection gives its own up in a quarter of that
_LOOK_S = 0.05

_WHY_NOT = {
    errno.EADDRINUSE: "the port is in use by another program",
    errno.EADDRNOTAVAIL: "this device has no such address",
    errno.EACCES: "no permission to bind this port",
}


async def listen(endpoints: Sequence[Endpoint], flag: str = "--http") -> list[trio.SocketListener]:
    """Bind every endpoint or none. Raises LocalError naming the address, the port and the flag."""
    listeners: list[trio.SocketListener] = []
    try:
        for endpoint in endpoints:
            listeners += await _bind(endpoint, flag)
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


async def _bind(endpoint: Endpoint, flag: str) -> list[trio.SocketListener]:
    try:
        return list(await trio.open_tcp_listeners(endpoint.port, host=endpoint.host))
    except OSError as error:
        # A name that resolves to several addresses fails as a group; the first member says why.
        cause: BaseException = error
        while isinstance(cause.__cause__, BaseException):
            cause = cause.__cause__
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        number = cause.errno if isinstance(cause, OSError) else None
        why = _WHY_NOT.get(number or 0, str(cause))
        raise LocalError(f"cannot listen on {endpoint} ({flag}): {why}") from error


class HttpServer:
    """Serves an application on listeners until `run` is cancelled or `shutdown` called."""

    def __init__(
        self, app: Application, listeners: Sequence[trio.SocketListener], limits: Limits | None = None
    ) -> None:
        self._app = app
        self._listeners = list(listeners)
        self._limits = limits or Limits()
        self._bodies = Budget(self._limits.all_bodies_bytes, "request bodies")
        self._connections: set[Connection] = set()
        self._accepting = trio.CancelScope()
        self._everything = trio.CancelScope()
        self.refused = 0

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where it listens, with the ports that the system chose."""
        names = [listener.socket.getsockname() for listener in self._listeners]
        return [Endpoint(str(name[0]), int(name[1])) for name in names]

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def waiting(self) -> int:
        """Connections between two requests, or before their first."""
        return sum(connection.idle_since is not None for connection in self._connections)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve. Returns when `shutdown` has been called and the last connection is gone or its grace is over."""
        try:
            with self._everything:
                async with trio.open_nursery() as nursery:
                    with self._accepting:
                        await trio.serve_listeners(
                            self._serve, self._listeners, handler_nursery=nursery, task_status=_Ready(task_status)
                        )
        finally:
            for listener in self._listeners:
                listener.socket.close()

    def shutdown(self, grace_s: float | None = None) -> None:
        """Take no more connections, close idle ones, give running answers ``grace_s`` (default: `Limits.grace_s`), tell whoever
        still waits that this node stops, then end. Idempotent."""
        if self._accepting.cancel_called:
            return
        self._accepting.cancel()
        for listener in self._listeners:
            listener.socket.close()
        end_by = trio.current_time() + (self._limits.grace_s if grace_s is None else grace_s)
        self._everything.deadline = end_by + LAST_WORDS_S
        for connection in self._connections:
            connection.finish(end_by)

    def _take_place(self) -> bool:
        """A place among those that are served in full, if need be that of one who is of no use."""
        placed = [connection for connection in self._connections if not connection.crowded]
        taken = sum(not connection.dropped for connection in placed)
        return taken < self._limits.connections or self._drop_one(placed)

    def _drop_one(self, among: Iterable[Connection]) -> bool:
        """End whichever has been of no use for longest; its owner can simply connect again."""
        now = trio.current_time()
        spare = [connection for connection in among if connection.spare(now)]
        if spare:
            min(spare, key=lambda connection: connection.waits_since).drop()
        return bool(spare)

    async def _place(self) -> bool:
        """As `_take_place`, for one that has a request: waits for those that have said nothing yet, and may never."""
        give_up = trio.current_time() + _PLACE_S
        while not self._take_place():
            silent = any(connection.waits for connection in self._connections if not connection.crowded)
            if not silent or trio.current_time() >= give_up:
                return False
            await trio.sleep(_LOOK_S)
        return True

    async def _serve(self, stream: trio.SocketStream) -> None:
        crowded = not self._take_place()
        reserve = [connection for connection in self._connections if connection.crowded]
        full = crowded and sum(not connection.dropped for connection in reserve) >= self._limits.reserve
        if full and not self._drop_one(reserve):
            self.refused += 1
            await trio.aclose_forcefully(stream)
            return
        place = self._place if crowded else None
        connection = Connection(stream, self._app, self._limits, self._bodies, place=place)
        self._connections.add(connection)
        try:
            await connection.run()
        except Exception:  # noqa: BLE001 - one connection must not end the server
            _log.exception("a connection ended in an error of our own")
        finally:
            self._connections.discard(connection)


class _Ready:
    """Passes on that the listeners serve, without the list of listeners that trio reports."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status = status

    def started(self, _listeners: object = None) -> None:
        self._status.started()
