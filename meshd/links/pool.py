"""Every link of this node: who may come in, whom to dial, which connection carries what.

Implements `meshd.links.wire.Links`. Owns listening, dialling and the pairs' connections; who may be at the other end is the
`Doorkeeper`'s business. Knows members only through callbacks (addresses, hello, what was heard), and nothing of what streams
carry.

Invariants: every connection was greeted by the doorkeeper; nobody holds a greeting slot longer than `PoolSettings.greet_s`;
connections are bounded; a pair may have several (both dialled at once), the newest carries new streams; a hello of another run
(its ``boot`` differs) closes what is left of the old one; so does one that answers while the old one is stuck.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import trio

from meshd.errors import Busy, LinkLost, LocalError, MeshdError, WrongPeer
from meshd.links import tls
from meshd.links.dialling import Backoff
from meshd.links.doorkeeper import BULK, MAIN, Doorkeeper, Guest, Hello, endpoint_of
from meshd.links.peer_link import LinkTiming, PeerLink
from meshd.links.peer_stream import PeerStream
from meshd.links.wire import Message
from meshd.vocabulary import Endpoint, NodeId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Limits of the pool."""

    connect_s: float = 3.0
    greet_s: float = 5.0
    stagger_s: float = 0.25  # head start of an address over the next one
    fresh_wait_s: float = 0.25  # how long a caller waits for a new connection where the old one does not answer
    bulk_wait_s: float = 1.0  # how long a bulk stream waits for its own connection before it takes the main one
    max_links: int = 1024
    max_greeting: int = 64
    max_per_pair: int = 4
    max_waiting_streams: int = 256
    timing: LinkTiming = field(default_factory=LinkTiming)


@dataclass(slots=True)
class _Dialling:
    """One dial that several callers may wait for."""

    done: trio.Event = field(default_factory=trio.Event)
    error: MeshdError | None = None


async def listen(endpoint: Endpoint) -> list[trio.SocketListener]:
    """Bind. Raises LocalError naming address, port and flag."""
    try:
        return await trio.open_tcp_listeners(endpoint.port, host=endpoint.host)
    except OSError as error:
        taken = any(e.errno == errno.EADDRINUSE for e in (error, error.__cause__) if isinstance(e, OSError))
        reason = "is in use by another program" if taken else f"cannot be used ({error.strerror or error})"
        raise LocalError(f"{endpoint} {reason}; choose another with --mesh HOST:PORT", param="--mesh") from error


def bound(listeners: Sequence[trio.SocketListener]) -> list[Endpoint]:
    """Where they listen, ports resolved."""
    return [endpoint_of(listener.socket.getsockname()) for listener in listeners]


class LinkPool:
    """See the module. `run` must be running for anything else to work."""

    def __init__(
        self,
        node_id: NodeId,
        *,
        security: tls.LinkTls | None,
        say_hello: Callable[[], Hello],
        on_hello: Callable[[NodeId, Hello, Endpoint], None],
        addresses: Callable[[NodeId], Sequence[Endpoint]],
        on_lost: Callable[[NodeId, str], None],
        barred: Container[NodeId] = frozenset(),
        settings: PoolSettings | None = None,
    ) -> None:
        """``on_hello`` gets the dialled address, or for an inbound link the peer's host with port 0; what it raises (a
        MeshdError) refuses the peer. ``on_lost`` is called when the last main link to a node goes, unless closed here.
        ``security`` may be replaced at any time: it counts for the next connection."""
        self._door = Doorkeeper(node_id, security, say_hello=say_hello, on_hello=on_hello, barred=barred)
        self._addresses = addresses
        self._on_lost = on_lost
        self._settings = settings or PoolSettings()
        self._links: dict[NodeId, dict[str, list[PeerLink]]] = {}
        self._backoff = Backoff()
        self._dialling: dict[tuple[NodeId, str], _Dialling] = {}
        self._greeting = 0
        self._nursery: trio.Nursery | None = None
        self._accepting = trio.CancelScope()
        self._closing = False
        self._waiting, self._streams = trio.open_memory_channel[PeerStream](self._settings.max_waiting_streams)

    # --- Links --------------------------------------------------------------------------------------------------------

    def live(self, node_id: NodeId) -> PeerLink | None:
        return self._newest(node_id, MAIN)

    async def get(self, node_id: NodeId, *, deadline_s: float = 3.0) -> PeerLink:
        link = self.live(node_id)
        if link is None:
            await self._shared_dial(node_id, MAIN, deadline_s)
            link = self.live(node_id)
        elif link.stuck(trio.current_time()):
            await self._freshen(node_id)
            link = self.live(node_id)
        if link is None:
            raise LinkLost(f"the link to {node_id[:8]} was lost at once")
        return link

    async def dial(self, endpoint: Endpoint, *, deadline_s: float = 3.0) -> PeerLink:
        """Raises LinkLost, WrongPeer."""
        return await self._race([endpoint], None, MAIN, deadline_s)

    def inbound(self) -> _Inbound:
        return _Inbound(self._streams)

    # --- more than Links ----------------------------------------------------------------------------------------------

    @property
    def security(self) -> tls.LinkTls | None:
        """The contexts for the next connection; open ones keep theirs."""
        return self._door.security

    @security.setter
    def security(self, security: tls.LinkTls | None) -> None:
        self._door.security = security

    @property
    def peers(self) -> list[NodeId]:
        """Whom there is a usable link to."""
        return [node_id for node_id in self._links if self.live(node_id) is not None]

    @property
    def connections(self) -> int:
        """All open connections, bulk ones too."""
        return sum(len(links) for pair in self._links.values() for links in pair.values())

    def heard(self, node_id: NodeId) -> None:
        """The node lives: forget its back-off. If its connection does not, as after a cut, it is replaced."""
        self._backoff.heard(node_id)
        link = self.live(node_id)
        if link is not None and link.stuck(trio.current_time()):
            self._begin_to_freshen(node_id)

    def close(self, node_id: NodeId, reason: str = "closed here") -> None:
        """Drop every connection to a node; its loss is not reported."""
        for links in self._links.pop(node_id, {}).values():
            for link in links:
                link.close(reason)

    async def drain(self, reason: str, *, grace_s: float = 5.0) -> None:
        """Take no more connections and streams, let the running streams finish, close everything."""
        self._closing = True
        self._accepting.cancel()
        async with trio.open_nursery() as nursery:
            for link in self._all():
                nursery.start_soon(_drain, link, reason, grace_s)

    async def run(
        self,
        listeners: Sequence[trio.SocketListener] = (),
        *,
        task_status: trio.TaskStatus[list[Endpoint]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled. Reports where it listens."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._accept_all, listeners)
                task_status.started(bound(listeners))
                await trio.sleep_forever()
        finally:
            self._closing = True
            self._nursery = None
            self._waiting.close()

    # --- coming in ----------------------------------------------------------------------------------------------------

    async def _accept_all(self, listeners: Sequence[trio.SocketListener]) -> None:
        try:
            with self._accepting:
                async with trio.open_nursery() as nursery:
                    for listener in listeners:
                        nursery.start_soon(self._accept, listener)
        finally:
            for listener in listeners:
                await trio.aclose_forcefully(listener)

    async def _accept(self, listener: trio.SocketListener) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:  # out of descriptors, or the peer was gone already
                _log.warning("accepting a link failed: %s", error)
                await trio.sleep(0.1)
                continue
            full = self._greeting >= self._settings.max_greeting or self.connections >= self._settings.max_links
            if full or self._nursery is None:
                await trio.aclose_forcefully(stream)
            else:
                self._greeting += 1
                self._nursery.start_soon(self._welcome, stream)

    async def _welcome(self, stream: trio.SocketStream) -> None:
        adopted = False
        try:
            with trio.move_on_after(self._settings.greet_s):
                guest = await self._door.welcome(stream)
                self._backoff.heard(guest.node_id)
                self._adopt(self._link(guest), guest.role)
                adopted = True
        except (MeshdError, OSError) as error:
            _log.debug("an inbound link was refused: %s", error)
        except Exception:  # noqa: BLE001  # whatever a stranger sends must not stop the node; it is logged whole
            _log.exception("greeting an inbound link failed")
        finally:
            self._greeting -= 1
            if not adopted:
                await trio.aclose_forcefully(stream)

    # --- going out ----------------------------------------------------------------------------------------------------

    async def _shared_dial(self, node_id: NodeId, role: str, deadline_s: float) -> None:
        """Wait for a dial of this node, started by whoever came first. Raises LinkLost, WrongPeer."""
        dialling = self._dialling.get((node_id, role))
        if dialling is None:
            addresses = self._may_dial(node_id)
            dialling = self._dialling[node_id, role] = _Dialling()
            self._running().start_soon(self._dial_peer, node_id, role, addresses, dialling)
        with trio.move_on_after(deadline_s):
            await dialling.done.wait()
        if not dialling.done.is_set():
            raise LinkLost(f"{node_id[:8]} did not answer within {deadline_s:g} s")
        if dialling.error is not None:
            raise dialling.error.with_traceback(None)

    def _begin_to_freshen(self, node_id: NodeId) -> None:
        if self._nursery is not None and not self._closing and (node_id, MAIN) not in self._dialling:
            self._nursery.start_soon(self._freshen, node_id)

    async def _freshen(self, node_id: NodeId) -> None:
        """Try for a new connection beside one that does not answer, for a moment."""
        with contextlib.suppress(MeshdError):
            await self._shared_dial(node_id, MAIN, self._settings.fresh_wait_s)

    def _may_dial(self, node_id: NodeId) -> tuple[Endpoint, ...]:
        self._door.admit(node_id, None)
        addresses = tuple(self._addresses(node_id))
        if not addresses:
            raise LinkLost(f"no address of {node_id[:8]} is known")
        now = trio.current_time()
        failure = self._backoff.blocks(node_id, addresses, now)
        if failure is not None:
            raise LinkLost(f"{failure.reason} ({failure.times} times; next try in {failure.until - now:.1f} s)")
        return addresses

    async def _dial_peer(self, node_id: NodeId, role: str, addresses: Sequence[Endpoint], dialling: _Dialling) -> None:
        try:
            await self._race(addresses, node_id, role, self._settings.connect_s)
        except MeshdError as error:
            dialling.error = error
            self._backoff.failed(node_id, addresses, error.message, trio.current_time())
        finally:
            self._dialling.pop((node_id, role), None)
            dialling.done.set()

    async def _race(
        self, addresses: Sequence[Endpoint], expect: NodeId | None, role: str, deadline_s: float
    ) -> PeerLink:
        """Try addresses, each with a head start over the next; the first that is greeted wins. Raises LinkLost, WrongPeer."""
        won: list[PeerLink] = []
        failures: dict[Endpoint, MeshdError] = {}
        with trio.move_on_after(deadline_s):
            async with trio.open_nursery() as nursery:

                async def attempt(endpoint: Endpoint, over: trio.Event) -> None:
                    try:
                        link = await self._greet_outbound(endpoint, expect, role)
                    except MeshdError as error:
                        failures[endpoint] = error
                    except Exception as error:  # noqa: BLE001  # what a peer says must not stop the node; logged whole
                        _log.exception("greeting %s failed", endpoint)
                        failures[endpoint] = LinkLost(f"{endpoint}: internal error ({type(error).__name__})")
                    else:
                        won.append(link)
                        nursery.cancel_scope.cancel()
                    over.set()

                for endpoint in addresses:
                    over = trio.Event()
                    nursery.start_soon(attempt, endpoint, over)
                    with trio.move_on_after(self._settings.stagger_s):
                        await over.wait()
        if won:
            return won[0]
        wrong = next((error for error in failures.values() if isinstance(error, WrongPeer)), None)
        if wrong is not None and len(failures) == len(addresses):
            raise wrong
        silent = [
            f"{endpoint}: no answer within {deadline_s:g} s" for endpoint in addresses if endpoint not in failures
        ]
        why = "; ".join([*(error.message for error in failures.values()), *silent])
        raise LinkLost(f"no link to {expect[:8] if expect else 'the node'}: {why}")

    async def _greet_outbound(self, endpoint: Endpoint, expect: NodeId | None, role: str) -> PeerLink:
        self._running()
        try:
            transport = await trio.open_tcp_stream(endpoint.host, endpoint.port)
        except OSError as error:
            raise LinkLost(f"{endpoint}: {error.strerror or error}") from error
        try:
            guest = await self._door.call(transport, endpoint, expect, role)
            self._backoff.heard(guest.node_id)
            link = self._link(guest)
            self._adopt(link, role)
        except BaseException as error:
            await trio.aclose_forcefully(transport)
            if isinstance(error, MeshdError):
                error.message = f"{endpoint}: {error.message}"
                error.args = (error.message,)
            raise
        return link

    # --- both ways ----------------------------------------------------------------------------------------------------

    def _link(self, guest: Guest) -> PeerLink:
        return PeerLink(
            guest.stream,
            guest.greeting.mux,
            guest.node_id,
            run_id=guest.hello.get("boot"),
            accept=self._offer,
            early=guest.greeting.early,
            timing=self._settings.timing,
        )

    def _adopt(self, link: PeerLink, role: str) -> None:
        """Take a greeted connection and serve it. Raises LinkLost when the pool is stopping."""
        nursery = self._running()
        if role == MAIN:
            link.bulk_link = lambda: self._bulk(link)
            link.when_stuck = lambda: self._begin_to_freshen(link.peer)
        pair = self._links.setdefault(link.peer, {MAIN: [], BULK: []})
        for other in (*pair[MAIN], *pair[BULK]):
            if other.run_id != link.run_id:  # its process is gone, though nobody may have told this connection
                other.close("the peer restarted")
        now = trio.current_time()
        for other in (*pair[MAIN], *pair[BULK]):
            if other.stuck(now):  # whoever waits on it starts again on this one
                other.close("a newer connection answers")
        links = pair[role]
        links.append(link)
        if len(links) > self._settings.max_per_pair:
            min(links[:-1], key=lambda other: other.streams).close("superseded")
        dialling = self._dialling.get((link.peer, role))
        if dialling is not None:
            dialling.done.set()
        nursery.start_soon(self._serve, link, role)

    async def _serve(self, link: PeerLink, role: str) -> None:
        try:
            await link.run()
        except Exception:  # noqa: BLE001  # a fault in one link must not take the others with it; it is logged whole
            _log.exception("the link to %s failed", link.peer)
        pair = self._links.get(link.peer)
        if pair is None or link not in pair[role]:
            return  # closed here
        pair[role].remove(link)
        if not pair[MAIN] and not pair[BULK]:
            del self._links[link.peer]
        if role == MAIN and not pair[MAIN] and not self._closing:
            self._on_lost(link.peer, link.reason or "")

    async def _bulk(self, main: PeerLink) -> PeerLink:
        """The pair's bulk connection, dialled if need be; the main one where that cannot be."""
        link = self._newest(main.peer, BULK)
        if link is None:
            try:
                await self._shared_dial(main.peer, BULK, self._settings.bulk_wait_s)
            except MeshdError as error:
                _log.debug("no bulk link to %s: %s", main.peer, error)
            link = self._newest(main.peer, BULK)
        return link or main

    def _newest(self, node_id: NodeId, role: str) -> PeerLink | None:
        pair = self._links.get(node_id)
        return next((link for link in reversed(pair[role]) if link.usable), None) if pair else None

    def _all(self) -> list[PeerLink]:
        return [link for pair in self._links.values() for links in pair.values() for link in links]

    def _offer(self, stream: PeerStream) -> None:
        try:
            self._waiting.send_nowait(stream)
        except (trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
            stream.fail(Busy("too many streams wait for this node"))

    def _running(self) -> trio.Nursery:
        if self._nursery is None or self._closing:
            raise LinkLost("the links of this node are closed")
        return self._nursery


class _Inbound:
    """Streams that peers open, until the pool stops."""

    def __init__(self, streams: trio.MemoryReceiveChannel[PeerStream]) -> None:
        self._streams = streams

    def __aiter__(self) -> _Inbound:
        return self

    async def __anext__(self) -> tuple[NodeId, Message, PeerStream]:
        while True:
            try:
                stream = await self._streams.receive()
            except (trio.EndOfChannel, trio.ClosedResourceError):
                raise StopAsyncIteration from None
            first = stream.first()
            if first is not None:
                return stream.peer, first, stream


async def _drain(link: PeerLink, reason: str, grace_s: float) -> None:
    await link.drain(reason, grace_s=grace_s)
    await link.closed()
