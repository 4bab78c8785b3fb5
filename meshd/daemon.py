"""The daemon: what is connected to what. Composition, no decisions.

Everything that decides lives in a package of its own; here one trio program binds addresses, builds the parts, hands each the
callables it needs, and takes them down in order. If you look for why something happens, it is not in this file.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import trio

from meshd import __version__
from meshd.api import http
from meshd.api.app import App
from meshd.api.node import Node, NodeFacts
from meshd.api.report import answer_fields
from meshd.chain.request import Finished, Started
from meshd.chain.service import ChainService
from meshd.config import Config, load
from meshd.directory import Directory, Member
from meshd.errors import MeshdError
from meshd.eventlog import EventLog, takes
from meshd.gossip.addresses import advertised, interfaces
from meshd.gossip.node import STREAM_KINDS, GossipOptions, GossipService
from meshd.gossip.settings import PRESETS
from meshd.identity import mesh_key, node_key
from meshd.identity.block_list import BlockList
from meshd.identity.mesh_key import KeyRing
from meshd.identity.node_key import Identity
from meshd.identity.sealed import Opener, Sealer
from meshd.identity.signing import Signer, verify_untrusted
from meshd.identity.state_folder import StateFolder
from meshd.inference.engine import Engine
from meshd.inference.keeper import StageKeeper
from meshd.links.pool import LinkPool
from meshd.links.tls import LinkTls
from meshd.links.wire import Message, Stream
from meshd.metrics.collector import RoomCollector, Sources
from meshd.metrics.instruments import Instruments
from meshd.metrics.measured import MeasuredChain, MeasuredEngine
from meshd.models.store import ModelStore
from meshd.node import admitting, electing, model, pass_on, share_wire
from meshd.node.access import guards_of
from meshd.node.admitting import Admitting
from meshd.node.advertising import Self, advert_of
from meshd.node.announcing import Announcer
from meshd.node.bar_watch import watch_bars
from meshd.node.claim_watch import ClaimWatch
from meshd.node.draining import Draining
from meshd.node.fetcher import Fetcher
from meshd.node.gap_watch import GapWatch
from meshd.node.hello import WIRE, addresses_untrusted, hello_of
from meshd.node.join_check import JoinCheck
from meshd.node.key_watch import watch_key
from meshd.node.next_links import keep_links
from meshd.node.notify import Notifier
from meshd.node.route_memory import remember_routes
from meshd.node.serving import Serving
from meshd.node.share_server import ModelShare
from meshd.node.sockets import Sockets, bound
from meshd.node.spot_checked import SpotChecked
from meshd.node.stage_loader import StageLoader, capacity_mb
from meshd.node.status import state_of, with_work
from meshd.node.weights import Weights
from meshd.roster import Roster
from meshd.routing.bandit import BanditPlanner
from meshd.vocabulary import Advert, Endpoint, Health, NodeId

DRAIN_S: Final = 10.0
BLOCKED: Final = "blocked"

_log = logging.getLogger(__name__)

Signalled = Callable[[], Awaitable[None]]


def start(argv: Sequence[str]) -> int:
    """``meshd start``: run until told to stop; the exit status."""
    config = load(argv)
    told = logging.StreamHandler(sys.stderr)
    told.addFilter(lambda _record: takes(sys.stderr))  # a terminal that was stopped must not stop the node
    logging.basicConfig(
        handlers=[told], level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", force=True
    )
    try:
        trio.run(_run, config)
    except BaseExceptionGroup as group:
        error = _only_error(group)
        if error is None:
            raise
        raise error from None
    return 0


def _only_error(group: BaseExceptionGroup[BaseException]) -> MeshdError | None:
    """The error of ours that ended the daemon, if nothing else did."""
    ours, rest = group.split(MeshdError)
    if ours is None or rest is not None:
        return None
    leaf: BaseException = ours
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf if isinstance(leaf, MeshdError) else None


async def _run(config: Config) -> None:
    with StateFolder(config.state) as folder, Notifier() as notifier:
        identity = node_key.begin_run(folder)
        ring = mesh_key.load(config.mesh_key_path) if config.mesh_key_path.exists() else None
        BlockList(config.state / BLOCKED).read()  # raises for a damaged one: at a start nobody would be barred
        async with bound(config) as sockets, trio.open_nursery() as nursery:
            await Daemon(config, identity, ring, sockets, nursery).run(notifier)
            nursery.cancel_scope.cancel()


class Daemon:
    """One node. Every attribute is a part; every method connects parts. ``nursery`` holds all tasks."""

    def __init__(
        self, config: Config, identity: Identity, ring: KeyRing | None, sockets: Sockets, nursery: trio.Nursery
    ) -> None:
        self.config, self.identity, self.ring, self.sockets, self.nursery = config, identity, ring, sockets, nursery
        self.began = trio.current_time()
        self.draining = Draining(config.drain_battery)
        self.health = Health()
        self.addresses = advertised(sockets.mesh, config.advertise, interfaces())
        self.me = Self(
            node_id=identity.node_id,
            name=config.name,
            epoch=identity.epoch,
            http=sockets.http,
            device="cpu",
            capacity_mb=capacity_mb(config),
            wire=WIRE,
        )
        self.log = EventLog(identity.node_id, config.name, form=config.event_log, level=config.log_level)
        self.announcer = Announcer(self.log, self.me.http, sockets.mesh)
        self.instruments = Instruments()
        self.log.subscribe(self.instruments.event)
        self.planner = BanditPlanner(
            explore_share=config.route_explore_share,
            weight_alpha=config.route_weight_alpha,
            half_life_s=config.route_stats_half_life,
            min_sample_tokens=config.route_min_sample_tokens,
            seed=config.route_seed,
        )
        self.barred = BlockList(config.state / BLOCKED)
        self.links = self._make_links()
        self.store = ModelStore.under(config.state)
        self.share = ModelShare(self.store, lambda: self.serving.served)
        self.fetcher = Fetcher(
            self.store,
            self.links,
            directory=self.directory,
            on_event=lambda name, fields: self.log.emit(name, **fields),
        )
        self.admitting = Admitting(
            identity.node_id,
            self.store,
            self.links,
            self.fetcher,
            enabled=config.admit,
            served=lambda: self.serving.served,
            engine=self.engine,
            directory=self.directory,
            log=self.log,
            on_verdict=self._rebuild,
        )
        self.roster = Roster(identity.node_id, self.admitting.verdict, self.barred.current)
        self.log.label = lambda: self.directory().label(identity.node_id) if self.directory().me else config.name
        self.claims = ClaimWatch(self.roster, self.log)
        self.gaps = GapWatch(self.log)
        self.join_check = JoinCheck(
            config.join,
            lambda: bool(self.directory().peers),
            lambda text: self.log.emit("alone", level="warning", text=text),
        )
        loader = StageLoader(
            config,
            lambda: self.serving.served,
            self.me.capacity_mb,
            nursery,
            log=_worker_said,
            weights=Weights(self.fetcher, None if config.offline else self._pull),
        )
        self.keeper = StageKeeper(self.admitting.proving(loader), self.changed)
        self.serving = Serving(
            config,
            identity,
            self.me.capacity_mb,
            keeper=self.keeper,
            links=self.links,
            fetcher=self.fetcher,
            directory=self.directory,
            log=self.log,
            on_change=self.changed,
            worker_said=_worker_said,
        )
        self.sealer = Sealer(ring, identity.node_id, identity.boot)
        self.opener = Opener(ring)
        self.gossip = self._make_gossip()
        self.chain = ChainService(
            identity.node_id,
            self.links,
            engine=self._measured_engine,
            planner=self.planner,
            directory=self.directory,
            model=lambda: self.serving.spec,
            notice=self._on_chain_notice,
            max_requests=config.max_sessions,
            max_relayed=config.max_sessions,
            max_computing=config.batch + config.max_queue,
        )
        self.app = App(self._node(), guards_of(config, ring))
        self.instruments.registry.register(RoomCollector(self._sources()))
        self.server = http.HttpServer(self.app, sockets.web)

    # --- parts that need more than a line -----------------------------------------------------------------------------

    def _make_links(self) -> LinkPool:
        return LinkPool(
            self.identity.node_id,
            security=LinkTls(self.identity.key, self.ring) if self.ring else None,
            say_hello=lambda: hello_of(self.identity, self.config.name, self.addresses),
            on_hello=self._on_hello,
            addresses=lambda node: self.gossip.addresses_of(node) or self.roster.addresses(node),
            on_lost=lambda node, _reason: self.gossip.lost(node),
            barred=self.barred,
        )

    def _make_gossip(self) -> GossipService:
        key, config = self.identity.key, self.config
        return GossipService(
            self._advert(),
            replace(PRESETS[config.preset], detector="window" if config.detector == "window" else "swim"),
            sockets=self.sockets.udp,
            bound=self.sockets.mesh,
            sealer=self.sealer,
            opener=self.opener,
            boot=self.identity.boot,
            sign=Signer(key),
            verify=verify_untrusted,
            links=self.links,
            options=GossipOptions(
                join=(*config.join, *config.next),
                advertise=config.advertise,
                mdns=config.mdns and not self.sockets.mesh.is_loopback,
                remembered=config.state / "peers",
            ),
            on_change=self._on_members,
            on_event=self._on_membership,
            on_addresses=self._on_addresses,
            fill_health=self._on_health,
            on_packet=self.links.heard,
        )

    def _node(self) -> Node:
        return Node(
            chain=MeasuredChain(SpotChecked(self.chain, self.admitting.consider), self.instruments, self._on_answer),
            directory=self.directory,
            facts=self._facts,
            text=lambda: None if self.draining.reason else self.serving.text,
            spec=lambda: self.serving.spec,
            engine=self.engine,
            routing=self._routing,
            events=self.log,
            registry=self.instruments.registry,
            drain=self._drain,
            resume=self._resume,
            pass_on=pass_on.Passer(self.links, self.directory),
            deaf=lambda: self.chain.deaf,
            sticky=self.config.kv == "sticky",
        )

    def _sources(self) -> Sources:
        return Sources(
            view=lambda: (self.directory(), self._facts(), self.serving.spec),
            engine=self.engine,
            in_flight=lambda: self.app.in_flight,
            tasks=lambda: trio.lowlevel.current_statistics().tasks_living,
            traffic=lambda: self.gossip.traffic,
            rejected=lambda: self.gossip.rejected,
            send_errors=lambda: self.gossip.send_errors,
            chain=lambda: self.chain.counters,
        )

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self, notifier: Notifier) -> None:
        """Until a signal; then drain and leave."""
        nursery = self.nursery
        await self._sweep()
        await nursery.start(self.links.run, self.sockets.links)
        await nursery.start(self.gossip.run)
        nursery.start_soon(self.chain.run)
        nursery.start_soon(self._serve_streams)
        await nursery.start(self.server.run)
        self.announcer.listening(alone=self.ring is None and not self.config.insecure_lan)
        nursery.start_soon(self.admitting.run)
        nursery.start_soon(self.keeper.run)
        nursery.start_soon(self.serving.run)
        if self.ring is not None:
            nursery.start_soon(watch_key, self.config.mesh_key_path, self.ring, self._on_key, self.log)
        nursery.start_soon(
            watch_bars, self.links, self.barred, lambda node: self.log.emit("barred", level="warning", peer=node)
        )
        nursery.start_soon(remember_routes, self.planner, self.config.state)
        nursery.start_soon(self.join_check.run)
        nursery.start_soon(keep_links, self.links, self.config.next, lambda line: self.log.emit("next", text=line))
        self.changed()
        nursery.start_soon(notifier.run, lambda: self.announcer.told or " ".join(self._state()))
        notifier.send(READY=1)  # it answers; that layers are served is told by /readyz
        # Code and tables are for good. Set aside, they are walked no more, so a full collection takes 5 ms and may come five
        # times as often: else the cycles that requests and lost links leave grow to 2 MB in the minutes between two (measured).
        gc.collect()
        gc.freeze()
        gc.set_threshold(700, 10, 2)
        # One receiver for both: between two the second signal would find nobody and end the process in mid-goodbye.
        with _stop_signals() as signalled:
            await signalled()
            notifier.send(STOPPING=1)
            await self._leave(signalled)

    async def _sweep(self) -> None:
        """Tidy the store before anybody looks for a model there. A node serves without that, too."""
        try:
            await trio.to_thread.run_sync(self.store.sweep)
        except MeshdError as error:
            self.log.emit("store", level="warning", text=f"left as it is: {error.message}")

    async def _leave(self, signalled: Signalled) -> None:
        """Drain and say goodbye; a second signal cuts it short."""
        async with trio.open_nursery() as nursery:

            async def second_signal() -> None:
                await signalled()
                nursery.cancel_scope.cancel()

            nursery.start_soon(second_signal)
            self.log.emit("leaving")
            self.gaps.stop()
            await self._drain()
            # Whoever comes now finds another entry sooner than this one would pass him on.
            self.server.shutdown(DRAIN_S)
            with trio.move_on_after(DRAIN_S):
                while self.app.in_flight or self.chain.running:
                    await trio.sleep(0.05)
            await self.gossip.leave()
            await self.links.drain("leaving", grace_s=0.5)
            nursery.cancel_scope.cancel()

    async def _serve_streams(self) -> None:
        """Hand each stream that a peer opens to its owner."""
        async for peer, message, stream in self.links.inbound():
            self.nursery.start_soon(self._serve_stream, peer, message, stream)

    async def _serve_stream(self, peer: NodeId, message: Message, stream: Stream) -> None:
        try:
            if message.kind in STREAM_KINDS:
                await self.gossip.serve(peer, message, stream)
            elif message.kind == electing.HOLD and self.serving.electing is not None:
                await self.serving.electing.serve_hold(peer, message, stream)
            elif message.kind.startswith(admitting.PREFIX):
                await self.admitting.serve(peer, message, stream)
            elif message.kind.startswith(share_wire.PREFIX):
                await self.share.serve(peer, message, stream)
            elif message.kind == pass_on.KIND:
                await pass_on.take_over(self.app, peer, message, stream)
            else:
                await self.chain.handle(peer, message, stream)
        except MeshdError as error:
            stream.fail(error)
        except Exception as error:  # noqa: BLE001 - one peer's stream must not end the node; logged whole
            _log.exception("a %s stream of %s failed", message.kind, peer)
            stream.fail(error)

    # --- what this node is and says of itself -------------------------------------------------------------------------

    def directory(self) -> Directory:
        return self.roster.directory

    def engine(self) -> Engine | None:
        """The stage, while it can be run."""
        return self.keeper.engine if self.keeper.held.state == "ready" else None

    def _measured_engine(self) -> Engine | None:
        engine = self.engine()
        return MeasuredEngine(engine, self.instruments) if engine is not None else None

    def changed(self) -> None:
        """Something that peers should know of this node changed."""
        self.gossip.set_advert(self._advert())
        self._on_members(self.gossip.members())
        spec = self.serving.spec
        expects = spec is not None or bool(self.config.join)
        self.announcer.ready(self._state(), spec, self.keeper.held.layers, self.directory(), expects=expects)

    def _advert(self) -> Advert:
        engine = self.engine()
        return advert_of(
            self.me,
            addresses=self.addresses,
            served=self.serving.served,
            held=self.keeper.held,
            claim=self.serving.electing.claim if self.serving.electing is not None else None,
            info=engine.info if engine is not None else None,
            entry=self.serving.text is not None,
            draining=bool(self.draining.reason),
        )

    def _state(self) -> tuple[str, str]:
        return state_of(
            self.keeper.held,
            draining=self.draining.reason,
            named=self.config.model is not None,
            found=self.serving.served is not None,
            pinned=self.config.layers is not None,
            why=self.serving.reason,
        )

    def _facts(self) -> NodeFacts:
        state, reason = self._state()
        engine = self.engine()
        return NodeFacts(
            state=state,
            reason=reason,
            name=self.config.name,
            version=__version__,
            uptime_s=trio.current_time() - self.began,
            kv_sessions=engine.health().sessions if engine is not None else 0,
            owned=self.chain.in_flight,
            relayed=self.chain.running,
            mdns=self.gossip.mdns,
            mesh=str(self.sockets.mesh),
            mesh_ids=tuple(key.mesh_id() for key in self.ring.keys) if self.ring else (),
            deterministic=engine.info.deterministic if engine is not None else self.config.deterministic,
            warnings=(*(engine.info.warnings if engine is not None else ()), *self.join_check.warnings),
            counters={
                **self.chain.counters,
                **self.admitting.counters,
                "rejected_datagrams": sum(self.gossip.rejected.values()),
            },
            health=self.health,
        )

    def _routing(self, model: str | None) -> Mapping[str, Any]:
        spec = self.serving.spec
        names = {spec.digest: spec.name} if spec is not None and model in (None, spec.name, spec.digest) else {}
        return self.planner.table(self.directory(), names, now=trio.current_time())

    # --- what is told -------------------------------------------------------------------------------------------------

    def _on_members(self, members: list[Member]) -> None:
        mine = next(member for member in members if member.node_id == self.identity.node_id)
        self.roster.set_self(mine.advert, self.health, proven=mine.advert.layers is not None)
        self.roster.set_peers(members)
        self._rebuild()
        self.admitting.look()

    def _on_membership(self, event: str, fields: Mapping[str, Any]) -> None:
        """Told by what the room calls the node from now on: its coming may be what makes two of one name."""
        self.roster.set_peers(self.gossip.members())
        self.log.emit(event, **{**fields, "name": self.roster.build().label(fields["node"])})

    def _rebuild(self) -> None:
        """What gossip or admission says has changed."""
        self.gaps.look(self.roster.build(), self.serving.spec)

    def _on_addresses(self, addresses: tuple[Endpoint, ...]) -> None:
        self.addresses = addresses
        self.changed()

    def _on_health(self, sampled: Health) -> Health:
        self.health = with_work(sampled, self.engine(), self.app.in_flight)
        if self.draining.sample(sampled):
            self.log.emit("drain", reason=self.draining.reason)
            self.changed()
        return self.health

    def _on_chain_notice(self, kind: str, fields: dict[str, Any]) -> None:
        self.log.emit(kind, **fields)
        if kind == "bad_rows":
            self.admitting.quarantine(fields["peer"], fields["reason"])

    def _on_answer(self, started: Started, finished: Finished, tokens: int) -> None:
        self.log.emit("answer", **answer_fields(started, finished, tokens, self.directory()))
        self.claims.answered(finished.route, tokens)

    def _on_hello(self, node: NodeId, hello: Mapping[str, Any], source: Endpoint) -> None:
        if node != self.identity.node_id:
            self.gossip.heard(node)
            self.gossip.join([source] if source.port else addresses_untrusted(hello), via="hello")
        elif hello.get("boot") != self.identity.boot:
            self.gossip.cloned(source)

    def _on_key(self, ring: KeyRing) -> None:
        """Use a changed ring, all of it or, with a MeshdError, nothing: datagrams under one ring and links under another find no
        room."""
        security, guards = LinkTls(self.identity.key, ring), guards_of(self.config, ring)
        self.ring = ring
        self.sealer.rekey(ring)
        self.opener.rekey(ring)
        self.links.security = security
        self.app.guards = guards

    async def _pull(self, name: str) -> None:
        await model.fetch(name, self.config.state, lambda line: self.log.emit("pull", level="debug", text=line))

    async def _drain(self) -> None:
        self.draining.order()
        self.changed()

    async def _resume(self) -> None:
        self.draining.resume()
        self.changed()


@contextlib.contextmanager
def _stop_signals() -> Iterator[Signalled]:
    """Gives what waits for the next signal that tells the process to stop."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:

        async def signalled() -> None:
            await anext(signals)

        yield signalled


def _worker_said(line: str) -> None:
    _log.info("worker: %s", line)
