"""One HTTP/1.1 connection: requests in, answers out, one after the other.

Owns framing (through h11), the time limits on everything the client must do, the watch for its leaving while a handler runs,
and the close that lets a refusal be read. Knows nothing of paths: the `Application` says, from the head alone, how large a body
may be and who answers. What fails, and what a shutdown breaks off, is told in an error document or in a stream's last event.

A client that closes its sending half while it waits counts as gone: no HTTP client of note does that and stays.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import h11
import trio

from meshd.api.limits import Budget, Limits
from meshd.api.message import Handler, Request, error_response, leaf_error, request_id, split_target
from meshd.api.outgoing import Outgoing
from meshd.api.sse import send_error
from meshd.errors import Busy, CallerError, MeshdError, NotReady, PayloadTooLarge, RequestTimeout

_log = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
_READ_AHEAD_BYTES = 64 * 1024  # what a client may send ahead of its answer before it is cut off
_FIRST_S = 0.25  # a client that connects has something to say
_CROWDED_HEADER_S = 2.0  # who has only a reserve place has its head ready
LAST_WORDS_S = 1.0  # for a client to take the news that its answer is broken off


@dataclass(frozen=True, slots=True)
class Plan:
    """What the application will do with a request whose head it has seen. ``body_bytes`` None: the server's own limit.
    ``health``: answered even on a reserve place. ``live``: never ends by itself, so a shutdown does not wait for it."""

    body_bytes: int | None
    answer: Handler
    health: bool = False
    live: bool = False


class Application(Protocol):
    """What the server serves."""

    def plan(self, head: Request, authority: str | None) -> Plan:
        """Decide from the head (no body yet). ``authority`` is that of an absolute target. Raises MeshdError to refuse."""
        ...


class TargetTooLong(CallerError):
    """A request target above its limit."""

    code = "target_too_long"
    status = 414


class HeadTooLarge(CallerError):
    """A request line and headers above their limit."""

    code = "head_too_large"
    status = 431


class _InternalError(MeshdError):
    """A fault of this program; the log has the traceback, the client the id to find it by."""


class _Gone(Exception):
    """The client left in the middle of its request."""


class Connection:
    """A connection's life. `run` returns when it is over; it never raises for what a client did."""

    def __init__(
        self,
        stream: trio.SocketStream,
        app: Application,
        limits: Limits,
        bodies: Budget,
        *,
        place: Callable[[], Awaitable[bool]] | None,
    ) -> None:
        """``place``: all places are taken; what to ask for one once there is a request."""
        self._stream = stream
        self._app = app
        self._limits = limits
        self._bodies = bodies
        self._place = place
        self.crowded = place is not None
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._client = _peer_address(stream)
        self._waiting = trio.CancelScope()
        self._finishing = False
        self._end_by = math.inf
        self.dropped = False
        self._out: Outgoing | None = None
        self._running: trio.CancelScope | None = None  # the handler
        self._live = False
        self._first = True  # still waits for its first request
        self.idle_since: float | None = None
        self._due: float | None = None  # when a client in good order would have sent what is still missing

    def finish(self, end_by: float = math.inf) -> None:
        """End after the running answer, which has until ``end_by`` (trio's clock); at once if there is none."""
        self._finishing, self._end_by = True, end_by
        if self._out is not None:
            self._out.close = True
        if self._running is not None:
            self._running.deadline = self._handler_ends()
        if self.idle_since is not None:
            self.idle_since = None
            self._waiting.cancel()

    def spare(self, now: float) -> bool:
        """True while it only waits: between two requests, for its first for longer than a client takes to send it, or for a
        head or a body that does not come."""
        if self._due is not None:
            return now > self._due
        return self.idle_since is not None and (not self._first or now - self.idle_since > _FIRST_S)

    @property
    def waits(self) -> bool:
        """True while it waits for its client."""
        return self.idle_since is not None or self._due is not None

    @property
    def waits_since(self) -> float:
        """Since when a spare one has been of no use."""
        return self.idle_since or self._due or 0.0

    def drop(self) -> None:
        """End a spare one at once: somebody else needs its place."""
        self.finish()
        self.dropped, self._due = True, None
        self._waiting.cancel()

    async def run(self) -> None:
        """Serve until either side is done."""
        try:
            while await self._exchange():
                self._h11.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, _Gone):
            pass  # the client is gone or takes nothing: there is nobody to tell
        finally:
            await trio.aclose_forcefully(self._stream)

    async def _exchange(self) -> bool:
        """One request and its answer; True if another may follow."""
        out = self._out = Outgoing(self._stream, self._h11, self._limits.write_s)
        out.close = self.crowded
        try:
            event = await self._read_head()
            if event is None:
                return False
            await self._answer(event, out)
        except MeshdError as error:
            await self._refuse(out, error)
        done = self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE
        return done and not (self.crowded or self._finishing)

    async def _answer(self, event: h11.Request, out: Outgoing) -> None:
        headers = _headers(event)
        out.begin(event.method == b"HEAD", request_id(headers.get("x-request-id")))
        target = event.target.decode("ascii")
        if len(target) > self._limits.target_bytes:
            raise _target_too_long(self._limits)
        authority, path, query = split_target(target)
        request = Request(
            method=event.method.decode("ascii"),
            path=path,
            query=query,
            headers=headers,
            client=self._client,
            request_id=out.request_id,
        )
        plan = self._app.plan(request, authority)
        if self._place is not None and self.crowded and not plan.health:
            if not await self._place():
                raise Busy("this node has no free connection now; health checks are still answered")
            self.crowded = False
            out.close = self._finishing
        with self._bodies.share() as share:
            limit = self._limits.body_bytes if plan.body_bytes is None else plan.body_bytes
            body = await self._read_body(limit, headers, share.grow)
            await self._run_handler(plan, replace(request, body=body), out)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read_head(self) -> h11.Request | None:
        """The next request's head; None when there is none (the client closed, idled too long, or we are finishing)."""
        if self._finishing and not self._h11.trailing_data[0]:
            return None
        head_s = _CROWDED_HEADER_S if self.crowded else self._limits.header_s
        self.idle_since = trio.current_time()
        begun = False
        wait_s = head_s if self._first else self._limits.idle_s
        self._waiting = trio.CancelScope(deadline=self.idle_since + wait_s)
        try:
            with self._waiting, self._expecting():
                while True:
                    event = self._next_event()
                    if isinstance(event, h11.Request):
                        self._first = False
                        return event
                    if event is not h11.NEED_DATA:
                        return None
                    data = await self._stream.receive_some(_READ_BYTES)
                    if not begun:
                        begun = True
                        self.idle_since = None
                        self._due = trio.current_time() + _FIRST_S
                        self._waiting.deadline = trio.current_time() + head_s
                    self._h11.receive_data(data)
            if begun:
                raise RequestTimeout(f"the request's head was not complete after {head_s:g} s")
            return None
        finally:
            self.idle_since = None

    async def _read_body(self, limit: int, headers: dict[str, str], grow: Callable[[int], None]) -> bytes:
        """The whole body, within ``limit``; ``grow`` counts its bytes against what all bodies together may take."""
        too_large = PayloadTooLarge(f"the body is larger than the {limit} bytes allowed here")
        if int(headers.get("content-length", "0")) > limit:
            raise too_large
        body = bytearray()
        started = trio.current_time()
        self._waiting = trio.CancelScope(deadline=started + self._limits.body_s)
        with self._waiting, self._expecting():
            while True:
                self._due = started + _FIRST_S + len(body) / self._limits.body_rate
                event = self._next_event()
                if isinstance(event, h11.Data):
                    if len(body) + len(event.data) > limit:
                        raise too_large
                    grow(len(event.data))
                    body += event.data
                    self._waiting.deadline = started + self._limits.body_s + len(body) / self._limits.body_rate
                elif isinstance(event, h11.EndOfMessage):
                    return bytes(body)
                elif event is h11.NEED_DATA:
                    if self._h11.they_are_waiting_for_100_continue:
                        await self._send_continue()
                    self._h11.receive_data(await self._stream.receive_some(_READ_BYTES))
                else:
                    raise _Gone
        raise RequestTimeout("the request's body came too slowly")

    @contextlib.contextmanager
    def _expecting(self) -> Iterator[None]:
        """Something is to come, and `_due` is set inside once it is known by when."""
        try:
            yield
        finally:
            self._due = None

    def _next_event(self) -> object:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                if b"\n" not in self._h11.trailing_data[0]:
                    raise _target_too_long(self._limits) from None
                raise HeadTooLarge(f"the request's head is larger than {self._limits.head_bytes} bytes") from None
            raise CallerError(f"not an HTTP/1.1 request: {error}") from None

    async def _send_continue(self) -> None:
        data = self._h11.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        with trio.fail_after(self._limits.write_s):
            await self._stream.send_all(data or b"")

    # --- answering ----------------------------------------------------------------------------------------------------

    async def _run_handler(self, plan: Plan, request: Request, out: Outgoing) -> None:
        """Run the handler; cancel it if the client leaves, or when a shutdown waits no longer."""
        left = done = usable = False
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal left
                await self._client_leaves()
                left = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            self._running, self._live = nursery.cancel_scope, plan.live
            nursery.cancel_scope.deadline = self._handler_ends()
            usable = await _guarded(plan, request, out)
            done = True
            nursery.cancel_scope.cancel()
        self._running = None
        if not (left or done or plan.live):
            with trio.move_on_after(LAST_WORDS_S):
                usable = await _tell(out, NotReady("this node stops; another one can go on with the answer"))
        if left or not usable or out.unfinished:
            raise _Gone

    def _handler_ends(self) -> float:
        return -math.inf if self._finishing and self._live else self._end_by

    async def _client_leaves(self) -> None:
        """Return when the client has closed its side, or sends more than a client that waits would.

        A client that has its whole answer does not wait: what it sends is its next request, however large, and is left for
        later.
        """
        ahead = 0
        try:
            while ahead <= _READ_AHEAD_BYTES:
                data = await self._stream.receive_some(_READ_BYTES)
                if not data:
                    return
                ahead += len(data)
                self._h11.receive_data(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        if self._h11.our_state is h11.DONE:
            await trio.sleep_forever()

    async def _refuse(self, out: Outgoing, error: MeshdError) -> None:
        """Send the error. If the client is still sending, close in a way that lets it read the answer first."""
        if out.started:
            raise _Gone
        unread = self._h11.their_state is not h11.DONE
        out.close = out.close or unread
        await out.respond(error_response(error))
        if not unread or self.dropped:
            return
        with trio.move_on_after(self._limits.linger_s):
            await self._stream.send_eof()
            while await self._stream.receive_some(_READ_BYTES):
                pass


async def _guarded(plan: Plan, request: Request, out: Outgoing) -> bool:
    """Let the handler answer, and its errors be answered; False if the connection can no longer be used."""
    try:
        response = await plan.answer(request, out)
        if response is None:
            await out.end()
        else:
            await out.respond(response)
        return True
    except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
        return False
    except Exception as error:  # noqa: BLE001 - whatever a handler does wrong ends its own request only
        ours = leaf_error(error)
        if ours is None:
            _log.exception("request %s to %s failed", request.request_id, request.path)
            if out.started:
                return False  # broken off: whoever can resume an answer does so elsewhere
            ours = _InternalError(f"an error of meshd itself; its log has it under request {request.request_id}")
        return await _tell(out, ours)


async def _tell(out: Outgoing, error: MeshdError) -> bool:
    """Answer with an error, or end a stream with it; False if the connection can no longer be used."""
    try:
        if not out.started:
            await out.respond(error_response(error))
        elif out.between_events:
            await send_error(out, error)
            await out.end()
        else:
            return False
    except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
        return False
    return True


def _target_too_long(limits: Limits) -> TargetTooLong:
    return TargetTooLong(f"the request target is longer than {limits.target_bytes} bytes")


def _headers(event: h11.Request) -> dict[str, str]:
    """Header names in lower case; repeated ones joined, as HTTP lets them be."""
    table: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        table[name] = f"{table[name]}, {value}" if name in table else value
    return table


def _peer_address(stream: trio.SocketStream) -> str:
    """The client's address, an IPv4 one behind an IPv6 socket as IPv4; "" if it is gone already."""
    try:
        host = str(stream.socket.getpeername()[0])
        address = ipaddress.ip_address(host.partition("%")[0])
    except (OSError, ValueError):
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)
