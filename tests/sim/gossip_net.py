"""A simulated network of gossip cores: one event queue, virtual time, seeded faults.

Datagrams are lost, delayed (and so reordered), doubled and cut by direction; exchanges and checks go over a simulated TCP
that retransmits with doubling timeouts and gives up after three seconds. A node can be killed (its host refuses), unplugged
(its host is silent), frozen (its inbox fills), restarted with or without its epoch. Bytes are counted as they would leave:
payload, seal, IP and UDP headers. The same seed gives the same run, and ``trace`` says in one line each what happened.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Final

from meshd.gossip import exchange, peers_file
from meshd.gossip.core import GossipCore
from meshd.gossip.effects import Changed, Check, Effect, Event, Exchange, Send
from meshd.gossip.exchange import Message, Step
from meshd.gossip.rumours import Rumours
from meshd.gossip.settings import GossipSettings
from meshd.gossip.wire import Word
from meshd.vocabulary import Advert, Endpoint, Health, LayerRange, NodeId, NodeStatus

SEAL_BYTES: Final = 60
UDP_BYTES: Final = 28
LINK_BYTES: Final = 40 + 29 + 12  # TCP/IP headers, a TLS record, a frame: per message, acknowledgements not counted
INBOX: Final = 1000


@cache
def node_id(index: int) -> NodeId:
    return NodeId(hashlib.sha256(b"node %d" % index).hexdigest()[:32])


def endpoint(index: int, interface: int = 0) -> Endpoint:
    return Endpoint(f"10.{interface}.{index >> 8}.{index & 255}", 8091)


def fake_sign(node: NodeId) -> Callable[[bytes], bytes]:
    """As large as a real one (key and signature), as cheap as a hash."""
    return lambda body: hashlib.blake2b(body, key=node.encode()[:32]).digest() + bytes(32)


def fake_verify(node: NodeId, body: bytes, signature: bytes) -> bool:
    return signature == hashlib.blake2b(body, key=node.encode()[:32]).digest() + bytes(32)


@dataclass(frozen=True, slots=True)
class Seen:
    """One event-log line of one observer."""

    at: float
    observer: int
    name: str
    subject: int


@dataclass(slots=True)
class Faults:
    """What the network does to every datagram; cuts are ordered pairs of indices."""

    loss: float = 0.0
    delay_s: float = 0.001
    jitter_s: float = 0.001
    double: float = 0.0
    cut: set[tuple[int, int]] = field(default_factory=set)
    udp_cut: set[tuple[int, int]] = field(default_factory=set)


@dataclass(slots=True)
class SimNode:
    """A device: its core while it runs, and what survives a restart."""

    index: int
    core: GossipCore | None
    epoch: int = 1
    interface: int = 0
    frozen: bool = False
    unplugged: bool = False
    clock_offset: float = 0.0
    remembered: list[Endpoint] = field(default_factory=list)  # what the file of peers would say
    inbox: list[tuple[bytes, int, Endpoint]] = field(default_factory=list)
    wake_at: float = -1.0
    sent_bytes: int = 0
    sent_datagrams: int = 0
    link_bytes: int = 0
    largest: int = 0


class SimNet:
    """Nodes 0..n-1 and the queue of what happens when."""

    def __init__(self, settings: GossipSettings | None = None, *, seed: int = 0, health: bool = False) -> None:
        self.settings = settings or GossipSettings()
        self.rng = Random(seed)
        self.now = 100.0
        self.faults = Faults()
        self.nodes: dict[int, SimNode] = {}
        self.seen: list[Seen] = []
        self.trace: list[str] = []
        self.health = health
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._index: dict[NodeId, int] = {}
        self.by_address: dict[Endpoint, int] = {}

    # --- scripts

    def start(self, index: int, *, join: tuple[int, ...] = (), keep_epoch: bool = True) -> None:
        """Start a device, or start it again: a higher epoch if it kept its state."""
        node = self.nodes.get(index)
        if node is None:
            node = self.nodes[index] = SimNode(index, None)
            self._index[node_id(index)] = index
        else:
            node.epoch += keep_epoch
        self._say(f"start {index} epoch {node.epoch} join {join}")
        node.frozen = node.unplugged = False
        node.inbox.clear()
        node.wake_at = -1.0
        self.by_address[endpoint(index, node.interface)] = index
        node.core = GossipCore(
            self.advert(node),
            self.settings,
            sign=fake_sign(node_id(index)),
            verify=fake_verify,
            rng=Random(self.rng.getrandbits(64)),
            now=self.local(node),
        )
        if self.health:
            self._sample(node, node.core)
        self.act(node, node.core.join([endpoint(j, self.nodes[j].interface) for j in join], self.local(node)))
        if keep_epoch and node.remembered:
            self.act(node, node.core.join(node.remembered, self.local(node), via="remembered"))

    def start_many(self, count: int, *, settle_s: float = 5.0) -> None:
        """Nodes 0..count-1, each joining the first, and time to settle."""
        for index in range(count):
            self.start(index, join=(0,) if index else ())
            self.run(0.02)
        self.run(settle_s)

    def start_settled(self, count: int) -> None:
        """Nodes 0..count-1 that have known each other for long: for rooms whose formation would take most of a test."""
        for index in range(count):
            self.start(index)
        words: list[Word] = []
        for node in self.nodes.values():
            said = exchange.decode_untrusted(self.core(node.index).exchange_begin(), node_id(node.index))
            words += said.words
        news = exchange.encode(Message(Step.NEWS, tuple(words)))
        for node in self.nodes.values():
            core = self.core(node.index)
            core.exchange_serve(node_id(node.index), news, self.local(node))
            core._room.rumours = Rumours()  # old news: nobody tells it any more
            self._schedule(node)
        self.seen.clear()
        self.trace.clear()

    def advert(self, node: SimNode) -> Advert:
        i = node.index
        address = endpoint(i, node.interface)
        return Advert(
            node_id=node_id(i),
            name=f"n{i}",
            epoch=node.epoch,
            incarnation=0,
            addresses=(address,),
            http=Endpoint(address.host, 8090),
            version="0.1.0",
            model="smollm2-135m",
            digest=hashlib.sha256(b"model").hexdigest(),
            dtype="bf16",
            arith="a1b2c3d4",
            num_layers=30,
            layers=LayerRange(0, 15) if i % 2 else LayerRange(15, 30),
            generation=1,
            entry=True,
        )

    def kill(self, index: int) -> None:
        """SIGKILL: no word to anybody, the host refuses from now on."""
        self._say(f"kill {index}")
        node = self.nodes[index]
        if node.core is not None:
            known = node.core.members(self.local(node))
            node.remembered = peers_file.addresses(known) or node.remembered
        node.core = None

    def unplug(self, index: int) -> None:
        """Nothing in, nothing out, no refusals; the process runs on."""
        self._say(f"unplug {index}")
        self.nodes[index].unplugged = True

    def plug(self, index: int) -> None:
        self._say(f"plug {index}")
        self.nodes[index].unplugged = False

    def freeze(self, index: int) -> None:
        self._say(f"freeze {index}")
        self.nodes[index].frozen = True

    def thaw(self, index: int) -> None:
        """Run again: the kernel's queue first, then the timers, as the transport does."""
        self._say(f"thaw {index}")
        node = self.nodes[index]
        node.frozen = False
        inbox, node.inbox = node.inbox, []
        for payload, sender, source in inbox:
            self._receive(node, payload, sender, source)
        self._wake(node)

    def move(self, index: int, interface: int) -> None:
        """The next start is at another address."""
        self.by_address.pop(endpoint(index, self.nodes[index].interface), None)
        self.nodes[index].interface = interface

    def leave(self, index: int) -> None:
        """Say so three times, 100 ms apart, and go."""
        self._say(f"leave {index}")
        node = self.nodes[index]
        for wait in (0.0, 0.1, 0.2):
            self.at(wait, lambda: self._leave_once(node))
        self.at(0.3, lambda: setattr(node, "core", None))

    def partition(self, *groups: range | list[int]) -> None:
        self._say(f"partition {[list(g) for g in groups]}")
        for a, b in itertools.permutations(groups, 2):
            self.faults.cut.update((x, y) for x in a for y in b)

    def heal(self) -> None:
        self._say("heal")
        self.faults.cut.clear()
        self.faults.udp_cut.clear()

    def local(self, node: SimNode) -> float:
        """The node's own monotonic clock: no two devices share one."""
        return self.now + node.clock_offset + node.index * 1000.0

    # --- questions

    def running(self) -> list[int]:
        return [i for i, n in self.nodes.items() if n.core is not None]

    def core(self, index: int) -> GossipCore:
        core = self.nodes[index].core
        assert core is not None, f"node {index} does not run"
        return core

    def index(self, node: NodeId) -> int:
        return self._index[node]

    def state(self, observer: int, subject: int) -> NodeStatus | None:
        return self.core(observer).state_of(node_id(subject))

    def agreed(self, among: list[int] | None = None) -> bool:
        """Everybody thinks everybody alive, at the run it is in."""
        among = self.running() if among is None else among
        return all(self.state(o, s) is NodeStatus.ALIVE for o in among for s in among if o != s)

    def times(self, name: str, subject: int, since: float) -> dict[int, float]:
        """Observer -> seconds from ``since`` to its first such event."""
        found: dict[int, float] = {}
        for seen in self.seen:
            if seen.at >= since and seen.name == name and seen.subject == subject:
                found.setdefault(seen.observer, seen.at - since)
        return found

    def run_until(self, condition: Callable[[], bool], limit_s: float, step_s: float = 0.05) -> float:
        """Run until it holds; returns how long that took. Fails with the trace."""
        begun = self.now
        while not condition():
            if self.now - begun >= limit_s:
                raise AssertionError(f"not so within {limit_s} s; the run:\n" + "\n".join(self.trace))
            self.run(step_s)
        return self.now - begun

    # --- the machine

    def at(self, wait_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + wait_s, next(self._order), action))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until

    def act(self, node: SimNode, effects: list[Effect]) -> None:
        """Do what a core asked for, then see when it wants to be woken."""
        for effect in effects:
            match effect:
                case Send():
                    self._send(node, effect.to, effect.payload)
                case Check():
                    self._check(node, effect)
                case Exchange():
                    self._exchange(node, effect)
                case Event():
                    subject = self._index[effect.node]
                    self.seen.append(Seen(self.now, node.index, effect.name, subject))
                    self._say(f"  n{node.index} says {effect.name} n{subject}")
                case Changed():
                    pass
        self._schedule(node)

    def _schedule(self, node: SimNode) -> None:
        if node.core is None or node.frozen:
            return
        when = self.now + max(0.0, node.core.deadline() - self.local(node))
        if node.wake_at < self.now or when < node.wake_at:
            node.wake_at = when
            core = node.core
            heapq.heappush(self._queue, (when, next(self._order), lambda: self._woken(node, core, when)))

    def _woken(self, node: SimNode, core: GossipCore, when: float) -> None:
        if node.wake_at == when:
            node.wake_at = -1.0
            if node.core is core and not node.frozen:
                self._wake(node)

    def _wake(self, node: SimNode) -> None:
        if node.core is not None:
            self.act(node, node.core.tick(max(self.local(node), min(node.core.deadline(), self.local(node) + 1e-6))))

    def _send(self, node: SimNode, to: Endpoint, payload: bytes) -> None:
        node.sent_bytes += len(payload) + SEAL_BYTES + UDP_BYTES
        node.sent_datagrams += 1
        node.largest = max(node.largest, len(payload) + SEAL_BYTES)
        target = self.by_address.get(to)
        if target is None or node.unplugged or self.nodes[target].unplugged:
            return
        if (node.index, target) in self.faults.cut or (node.index, target) in self.faults.udp_cut:
            return
        source = endpoint(node.index, node.interface)
        for _ in range(1 + (self.rng.random() < self.faults.double)):
            if self.rng.random() >= self.faults.loss:
                self.at(self._delay(), lambda: self._arrive(target, payload, node.index, source))

    def _delay(self) -> float:
        return self.faults.delay_s + self.rng.random() * self.faults.jitter_s

    def _arrive(self, target: int, payload: bytes, sender: int, source: Endpoint) -> None:
        node = self.nodes[target]
        if node.core is None or node.unplugged:
            return
        if node.frozen:
            if len(node.inbox) < INBOX:
                node.inbox.append((payload, sender, source))
            return
        self._receive(node, payload, sender, source)

    def _receive(self, node: SimNode, payload: bytes, sender: int, source: Endpoint) -> None:
        assert node.core is not None
        self.act(node, node.core.receive(payload, node_id(sender), source, self.local(node)))

    # --- simulated TCP

    def _over_tcp(self, source: SimNode, target: int, size: int) -> float | None:
        """How long a message takes, with retransmissions; None if it does not get there within three seconds."""
        source.link_bytes += size + LINK_BYTES
        took, timeout = self._delay(), 0.2
        while took < 3.0:
            node = self.nodes[target]
            blocked = (source.index, target) in self.faults.cut or (target, source.index) in self.faults.cut
            if not blocked and not source.unplugged and not node.unplugged and self.rng.random() >= self.faults.loss:
                return took
            took, timeout = took + timeout, timeout * 2
        return None

    def _check(self, node: SimNode, check: Check) -> None:
        target, core = self._index[check.node], node.core
        there = self._over_tcp(node, target, 20)
        back = self._over_tcp(self.nodes[target], node.index, 20) if there is not None else None
        if there is None or back is None:
            return

        def arrived() -> None:
            other = self.nodes[target]
            if other.core is not None and not other.frozen:
                self.at(back, answered)

        def answered() -> None:
            if node.core is not None and node.core is core and not node.frozen:
                self.act(node, node.core.checked(check.node, True, self.local(node)))

        self.at(there, arrived)

    def _exchange(self, node: SimNode, exchange: Exchange) -> None:
        target = next((self.by_address[e] for e in exchange.endpoints if e in self.by_address), None)
        if target is None or target == node.index or node.core is None:
            return
        caller, me = node.core, node_id(node.index)

        def call(message: bytes | None) -> None:
            if message is not None and (took := self._over_tcp(node, target, len(message))) is not None:
                self.at(took, lambda: serve(message))

        def serve(message: bytes) -> None:
            other = self.nodes[target]
            if other.core is None or other.frozen:
                return
            answer, effects = other.core.exchange_serve(me, message, self.local(other))
            self.act(other, effects)
            if answer is not None and (took := self._over_tcp(other, node.index, len(answer))) is not None:
                self.at(took, lambda: hear(answer))

        def hear(answer: bytes) -> None:
            if node.core is caller and not node.frozen:
                message, effects = caller.exchange_reply(node_id(target), answer, self.local(node))
                self.act(node, effects)
                call(message)

        call(caller.exchange_begin())

    # --- the rest

    def _leave_once(self, node: SimNode) -> None:
        if node.core is not None:
            self.act(node, node.core.leave(self.local(node)))

    def _sample(self, node: SimNode, core: GossipCore) -> None:
        if node.core is core:
            if not node.frozen:
                health = Health(
                    ram_free_mb=self.rng.randrange(500, 16000),
                    ram_total_mb=16000,
                    load1=self.rng.random() * 4,
                    in_flight=self.rng.randrange(4),
                    tokens_per_s=self.rng.random() * 50,
                    kv_used_mb=self.rng.randrange(900),
                    kv_total_mb=900,
                    battery_pct=80,
                    on_ac=True,
                    temp_c=55.0,
                )
                self.act(node, core.set_health(health, self.local(node)))
            self.at(1.5, lambda: self._sample(node, core))

    def _say(self, line: str) -> None:
        if len(self.trace) < 5000:
            self.trace.append(f"{self.now:9.3f} {line}")
