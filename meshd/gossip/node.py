"""The gossip service of a daemon: the core with sockets, a clock and links around it.

Owns performing the core's effects and nothing else; every decision is the core's. One nursery holds it all: a reader for each
socket, the timer, exchanges and checks over links (bounded), and as asked for the address watch, mDNS, the health sampler and
the file of remembered peers.

The timer drains the sockets before it lets the core look at its deadlines: after a stall of this process the answers are
already here, and judging first would call healthy members silent.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from meshd.directory import Member
from meshd.errors import BadDatagram, MeshdError
from meshd.gossip import addresses as own_addresses
from meshd.gossip import peers_file
from meshd.gossip.addresses import is_literal
from meshd.gossip.core import GossipCore
from meshd.gossip.discovery import Discovery
from meshd.gossip.effects import Changed, Check, Effect, Event, Exchange, Send
from meshd.gossip.health_sampler import HealthSampler
from meshd.gossip.limits import EXCHANGE_BYTES
from meshd.gossip.settings import GossipSettings
from meshd.gossip.statement import Sign, Verify
from meshd.gossip.transport import Transport, UdpSocket
from meshd.links.wire import Link, Links, Message, Stream
from meshd.vocabulary import Advert, Endpoint, Health, NodeId

PUSH_PULL: Final = "gossip.pushpull"
CHECK: Final = "gossip.check"
STREAM_KINDS: Final = (PUSH_PULL, CHECK)

_REFRESH_S: Final = 1.0  # members are told this often at least: ages and health move without a change
_WATCH_S: Final = 5.0  # own addresses, suspends
_RESOLVE_S: Final = 30.0
_REMEMBER_S: Final = 10.0
_EXCHANGE_S: Final = 10.0
_CHECK_S: Final = 3.0
_TASKS: Final = 32  # exchanges and checks at once; more are dropped, the core asks again
_GOODBYES: Final = (0.0, 0.1, 0.1)

_log = logging.getLogger(__name__)


class Seal(Protocol):
    """`meshd.identity.sealed.Sealer`."""

    def seal(self, payload: bytes) -> bytes: ...


class Open(Protocol):
    """`meshd.identity.sealed.Opener`."""

    def open_untrusted(self, data: bytes) -> tuple[NodeId, bytes, bytes]: ...


@dataclass(frozen=True, slots=True)
class GossipOptions:
    """What a daemon may ask for beside the core."""

    join: tuple[Endpoint, ...] = ()
    advertise: Endpoint | None = None
    mdns: bool = True
    sample_health: bool = True
    remembered: Path | None = None


class GossipService:
    """See the module. ``bound`` is the mesh address with its real port; ``links`` may be set later.

    ``on_change(members)`` is called in the event loop when anything changed and once a second; ``on_event(name, fields)``
    for the event log, with ``node`` and ``name`` of whom it is about among the fields; ``on_addresses`` when what should be
    advertised changes (the daemon answers with `set_advert`); ``on_packet`` for every datagram of another node itself. None
    of them may block or raise.
    """

    def __init__(
        self,
        advert: Advert,
        settings: GossipSettings,
        *,
        sockets: Sequence[UdpSocket],
        bound: Endpoint,
        sealer: Seal,
        opener: Open,
        boot: bytes,
        sign: Sign,
        verify: Verify,
        links: Links | None = None,
        options: GossipOptions | None = None,
        on_change: Callable[[list[Member]], None],
        on_event: Callable[[str, Mapping[str, Any]], None],
        on_addresses: Callable[[tuple[Endpoint, ...]], None] | None = None,
        fill_health: Callable[[Health], Health] | None = None,
        on_packet: Callable[[NodeId], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.links = links
        self.rejected: Counter[str] = Counter()  # datagrams that were not ours to read, by reason
        self._options = options or GossipOptions()
        self._transport = Transport(sockets)
        self._bound = bound
        self._sealer, self._opener, self._boot = sealer, opener, boot
        self._on_change, self._on_event, self._on_addresses = on_change, on_event, on_addresses
        self._on_packet = on_packet
        self._core = GossipCore(
            advert, settings, sign=sign, verify=verify, rng=rng or random.SystemRandom(), now=trio.current_time()
        )
        self._sampler = HealthSampler(self.set_health, fill_health)
        self._discovery = Discovery(
            advert.node_id,
            addresses=lambda: self._core.advert.addresses,
            bound=bound,
            found=lambda endpoints: self.join(endpoints, via="mdns"),
            gone=self._withdrawn,
        )
        self._sleep = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._busy = 0
        self._addresses = advert.addresses

    # --- what the daemon asks -----------------------------------------------------------------------------------------

    @property
    def node_id(self) -> NodeId:
        return self._core.node_id

    @property
    def mdns(self) -> str:
        """For ``/status``."""
        return self._discovery.state if self._options.mdns else "off"

    @property
    def send_errors(self) -> Mapping[str, int]:
        """Refused sends by errno name."""
        return self._transport.errors

    @property
    def traffic(self) -> Mapping[str, int]:
        """Datagrams and bytes that went out and came in, whatever they were."""
        sockets = self._transport
        return {
            "sent_datagrams": sockets.sent_datagrams,
            "sent_bytes": sockets.sent_bytes,
            "received_datagrams": sockets.received_datagrams,
            "received_bytes": sockets.received_bytes,
        }

    def members(self) -> list[Member]:
        """Everybody as of now, this node first."""
        return self._core.members(trio.current_time())

    def addresses_of(self, node_id: NodeId) -> tuple[Endpoint, ...]:
        """Where to dial a member, best first."""
        return self._core.addresses_of(node_id)

    # --- what the daemon tells ----------------------------------------------------------------------------------------

    def join(self, endpoints: Sequence[Endpoint], *, via: str = "join") -> None:
        """Numeric addresses to try; for names see `GossipOptions.join`."""
        self._perform(self._core.join(endpoints, trio.current_time(), via=via))

    def set_advert(self, advert: Advert) -> None:
        """Say something new of ourselves."""
        before = self._core.advert.addresses
        self._perform(self._core.set_advert(advert, trio.current_time()))
        if advert.addresses != before:
            self._discovery.readdress()

    def set_health(self, health: Health) -> None:
        self._perform(self._core.set_health(health, trio.current_time()))

    def heard(self, node_id: NodeId) -> None:
        """A hop or link of that node answered."""
        self._perform(self._core.heard(node_id, trio.current_time()))

    def lost(self, node_id: NodeId) -> None:
        """A hop to that node failed: it is suspect at once, and asked at once."""
        self._perform(self._core.lost(node_id, trio.current_time()))

    def cloned(self, source: Endpoint) -> None:
        """Somebody else with our key was met (a link's hello with another boot)."""
        self._perform(self._core.cloned(source, trio.current_time()))

    async def leave(self) -> None:
        """Tell everybody that we go, thrice; takes 0.2 s."""
        for pause in _GOODBYES:
            await trio.sleep(pause)
            self._perform(self._core.leave(trio.current_time()))

    async def serve(self, peer: NodeId, first: Message, stream: Stream) -> None:
        """A stream of one of `STREAM_KINDS` that a peer opened. Never raises for what the peer does."""
        try:
            with trio.fail_after(_EXCHANGE_S):
                if first.kind == CHECK:
                    await stream.send(Message(CHECK))
                    self.heard(peer)
                else:
                    await self._serve_exchange(peer, first, stream)
                await stream.end()
        except MeshdError as error:
            stream.fail(error)
        except trio.TooSlowError:
            stream.cancel()

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Closes the sockets."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for sock in self._transport.sockets:
                    nursery.start_soon(self._read, sock)
                nursery.start_soon(self._time)
                nursery.start_soon(self._refresh)
                nursery.start_soon(self._watch)
                self._start_options(nursery)
                task_status.started()
        finally:
            self._nursery = None
            self._transport.close()

    def _start_options(self, nursery: trio.Nursery) -> None:
        options = self._options
        self.join([endpoint for endpoint in options.join if is_literal(endpoint.host)])
        for endpoint in options.join:
            if not is_literal(endpoint.host):
                nursery.start_soon(self._resolve, endpoint)
        if options.remembered is not None:
            self.join(peers_file.read(options.remembered), via="remembered")
            nursery.start_soon(self._remember, options.remembered)
        if options.mdns:
            nursery.start_soon(self._discovery.run)
        if options.sample_health:
            nursery.start_soon(self._sampler.run)

    async def _read(self, sock: UdpSocket) -> None:
        while True:
            await self._transport.readable(sock)
            self._drain([sock])
            await trio.lowlevel.checkpoint()

    async def _time(self) -> None:
        """Sleep until the core's deadline, which `_perform` moves."""
        while True:
            with trio.CancelScope(deadline=self._core.deadline()) as self._sleep:
                await trio.sleep_forever()
            self._drain(self._transport.sockets)
            self._perform(self._core.tick(trio.current_time()))
            await trio.lowlevel.checkpoint()

    def _drain(self, sockets: Sequence[UdpSocket]) -> None:
        for data, source in self._transport.drain(sockets):
            try:
                sender, boot, payload = self._opener.open_untrusted(data)
                if sender != self._core.node_id:
                    self._perform(self._core.receive(payload, sender, source, trio.current_time()))
                    if self._on_packet is not None:
                        self._on_packet(sender)
                elif boot == self._boot:
                    self._core.echo(source)
                else:
                    self.cloned(source)
            except BadDatagram as error:
                self.rejected[getattr(error, "reason", "schema")] += 1

    async def _refresh(self) -> None:
        while True:
            self._on_change(self.members())
            await trio.sleep(_REFRESH_S)

    async def _watch(self) -> None:
        """Own addresses, and sleeps of the device that the monotonic clock does not count."""
        asleep_s = _suspended_s()
        while True:
            try:
                present = await trio.to_thread.run_sync(own_addresses.interfaces)
            except OSError as error:  # out of descriptors, for one: what was told stays
                _log.info("the addresses of this device cannot be read: %s", error)
            else:
                self._moved(own_addresses.advertised(self._bound, self._options.advertise, present))
            await trio.sleep(_WATCH_S)
            gap_s, asleep_s = _suspended_s() - asleep_s, _suspended_s()
            if gap_s >= self._core.settings.pause_s:
                self._perform(self._core.resumed(gap_s, trio.current_time()))

    def _moved(self, told: tuple[Endpoint, ...]) -> None:
        if told != self._addresses and self._on_addresses is not None:
            self._addresses = told
            self._on_addresses(told)

    async def _resolve(self, name: Endpoint) -> None:
        """A name of ``--join`` to addresses, again and again: it may not be known yet, and may move. Each by itself, for one
        that nobody answers for takes its time."""
        while True:
            self.join(await _literals(name), via="join")
            await trio.sleep(_RESOLVE_S)

    async def _remember(self, path: Path) -> None:
        remembered = peers_file.read(path)
        while True:
            await trio.sleep(_REMEMBER_S)
            known = peers_file.addresses(self.members())
            if known and known != remembered:
                await trio.to_thread.run_sync(peers_file.write, path, known)
                remembered = known

    def _withdrawn(self, endpoints: Sequence[Endpoint]) -> None:
        self._core.withdraw(endpoints, via="mdns")

    # --- effects ------------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        changed = False
        for effect in effects:
            match effect:
                case Send():
                    self._transport.send(effect.to, self._sealer.seal(effect.payload))
                case Check():
                    self._start(self._check, effect)
                case Exchange():
                    self._start(self._exchange, effect)
                case Changed():
                    changed = True
                case Event():
                    self._on_event(effect.name, {"node": effect.node, "name": effect.label, **effect.fields})
        if changed:
            self._on_change(self.members())
        self._sleep.deadline = self._core.deadline()

    def _start(self, task: Callable[[Any], Any], effect: Effect) -> None:
        if self.links is not None and self._nursery is not None and self._busy < _TASKS:
            self._busy += 1
            self._nursery.start_soon(self._bounded, task, effect)

    async def _bounded(self, task: Callable[[Any], Any], effect: Effect) -> None:
        """One exchange or check; a peer that is not there, or talks nonsense, is the core's business already."""
        try:
            with trio.move_on_after(_EXCHANGE_S):
                await task(effect)
        except MeshdError as error:
            _log.debug("%s: %s", effect, error)
        finally:
            self._busy -= 1

    async def _check(self, check: Check) -> None:
        assert self.links is not None  # noqa: S101 - `_start` has looked
        link = await self.links.get(check.node, deadline_s=_CHECK_S)
        stream = await link.open(Message(CHECK))
        with _ending(stream):
            if await stream.receive() is not None:
                self._perform(self._core.checked(check.node, True, trio.current_time()))
            await stream.end()

    async def _exchange(self, exchange: Exchange) -> None:
        link = await self._reach(exchange)
        if link.peer == self._core.node_id:
            return
        stream = await link.open(Message(PUSH_PULL, body=self._core.exchange_begin()))
        with _ending(stream):
            while True:
                answer = await stream.receive()
                if answer is None:
                    break
                reply, effects = self._core.exchange_reply(link.peer, _body(answer), trio.current_time())
                self._perform(effects)
                if reply is None:
                    break
                await stream.send(Message(PUSH_PULL, body=reply))
            await stream.end()

    async def _reach(self, exchange: Exchange) -> Link:
        assert self.links is not None  # noqa: S101 - `_start` has looked
        if exchange.node is not None:
            return await self.links.get(exchange.node)
        link = await self.links.dial(exchange.endpoints[0])
        self._core.met(exchange.endpoints[0], link.peer)
        return link

    async def _serve_exchange(self, peer: NodeId, first: Message, stream: Stream) -> None:
        message: Message | None = first
        while message is not None:
            answer, effects = self._core.exchange_serve(peer, _body(message), trio.current_time())
            self._perform(effects)
            if answer is not None:
                await stream.send(Message(PUSH_PULL, body=answer))
            message = await stream.receive()


@contextlib.contextmanager
def _ending(stream: Stream) -> Iterator[None]:
    """Leave no half-open stream behind, whatever happens."""
    try:
        yield
    except BaseException:
        stream.cancel()
        raise


def _body(message: Message) -> bytes:
    if len(message.body) > EXCHANGE_BYTES:
        raise BadDatagram(f"a push-pull message of {len(message.body)} bytes")
    return bytes(message.body)


def _suspended_s() -> float:
    """How long the device has slept since it was booted, where the system can tell."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(boottime) - time.clock_gettime(time.CLOCK_MONOTONIC) if boottime is not None else 0.0


async def _literals(name: Endpoint) -> list[Endpoint]:
    """Every address it has now; none while it cannot be resolved."""
    try:
        found = await trio.socket.getaddrinfo(name.host, name.port, type=trio.socket.SOCK_DGRAM)
    except OSError as error:
        _log.info("%s cannot be resolved: %s (tried again in %g s)", name.host, error, _RESOLVE_S)
        return []
    return [Endpoint(str(address[0]), name.port) for *_, address in found]
