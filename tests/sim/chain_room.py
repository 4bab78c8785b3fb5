"""A room in virtual time: the chain's cores, the hash model and a network that can do anything.

Every node has the real `Hops`, every request the real `Session`; only engines' durations, the network and the directory's delay
are made up. Events are (time, order, what). ``trace`` is the newest events, one a line, for when a run fails.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from meshd.chain.drafts import Drafts
from meshd.chain.effects import Begin, Compute, Emit, Fail, Failover, Finish, Forget, ReadLog, Recovered, Send, Watch
from meshd.chain.hops import Failed, Held, Hops, Kept, Missing, Outcome, Rows
from meshd.chain.messages import ChainMessage, Lost, Need, Opened, Progress, Reply, Why
from meshd.chain.replicas import DirectoryReplicas
from meshd.chain.request import GenerationRequest
from meshd.chain.session import Session
from meshd.directory import Directory, Member
from meshd.errors import Busy, MeshdError, NeedRows, RangeNotHeld
from meshd.inference.hash_stage import HashSessions, HashStage
from meshd.vocabulary import Advert, LayerRange, NodeId, NodeStatus, SessionId
from tests.fakes.planner import FakePlanner

DIGEST = "hash-model"
NOTICE_S = 2.0  # how late the directory learns of a death
RETURN_S = 0.3  # and of a restart


def node_id(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def short(node: str) -> str:
    return node.lstrip("0") or "0"


@dataclass
class SimNode:
    id: NodeId
    layers: LayerRange | None
    step_s: float
    hops: Hops
    sessions: HashSessions | None = None
    alive: bool = True
    frozen_at: float | None = None
    epoch: int = 1
    generation: int = 1
    draining: bool = False
    arith: str = "hash"
    inbox: list[Callable[[], None]] = field(default_factory=list)
    forgotten: Counter[SessionId] = field(default_factory=Counter)
    wake_at: float = math.inf

    @property
    def responsive(self) -> bool:
        return self.alive and self.frozen_at is None


@dataclass
class Running:
    """One request as its client sees it."""

    core: Session
    entry: NodeId
    began: float
    deadline_s: float
    want: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    tickets: dict[NodeId, int] = field(default_factory=dict)
    finished: str = ""
    error: MeshdError | None = None
    ended: float | None = None
    failovers: int = 0
    wake: int = 0

    @property
    def over(self) -> bool:
        return self.ended is not None


class SimRoom:
    def __init__(self, num_layers: int, seed: int, *, model_seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.num_layers = num_layers
        self.stage = HashStage(num_layers, model_seed)
        self.nodes: dict[NodeId, SimNode] = {}
        self.running: dict[SessionId, Running] = {}
        self.directory = Directory(node_id(0))
        self.planner = FakePlanner(self._shuffled)
        self.events: deque[tuple[float, tuple[object, ...]]] = deque(maxlen=4000)
        self.messages: Counter[str] = Counter()
        self.latency_s = 0.0005
        self.lossy: Callable[[], list[float]] | None = None  # delays of the copies of one message; empty: lost
        self.cuts: set[tuple[NodeId, NodeId]] = set()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._busy_until: dict[tuple[NodeId, NodeId], float] = {}

    def _shuffled(self, hops: list) -> list:  # type: ignore[type-arg] # the planner's own type
        self.rng.shuffle(hops)
        return hops

    # --- the room -----------------------------------------------------------------------------------------------------

    def add(self, number: int, layers: LayerRange | None, *, step_s: float = 0.002, arith: str = "hash") -> SimNode:
        node = SimNode(node_id(number), layers, step_s, Hops(node_id(number)), arith=arith)
        self.nodes[node.id] = node
        self._power(node)
        self.publish()
        return node

    def _power(self, node: SimNode) -> None:
        node.hops = Hops(node.id)
        node.wake_at = math.inf
        if node.layers:
            node.hops.held = Held(DIGEST, node.layers, node.generation, windows=node.arith == "hash")
            node.sessions = HashSessions(self.stage, node.layers, kv_bytes=1 << 30, bytes_per_token_layer=64)

    def publish(self) -> None:
        """The directory as everybody sees it now."""
        self.directory = self.directory.replace(
            Member(
                Advert(
                    node_id=n.id,
                    name=short(n.id),
                    epoch=n.epoch,
                    incarnation=0,
                    addresses=(),
                    digest=DIGEST,
                    arith=n.arith,
                    num_layers=self.num_layers,
                    layers=n.layers,
                    generation=n.generation,
                    draining=n.draining,
                ),
                state=NodeStatus.ALIVE,
                admitted=True,
            )
            for n in self.nodes.values()
            if n.alive
        )

    def note(self, *words: object) -> None:
        self.events.append((self.now, words))

    def trace(self, last: int) -> str:
        """The newest events, one a line."""
        lines = [f"{at:9.4f} " + " ".join(map(_word, words)) for at, words in list(self.events)[-last:]]
        return "\n".join(lines)

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill(self, number: int) -> None:
        node = self.nodes[node_id(number)]
        if not node.alive:
            return
        self.note("KILL", short(node.id))
        node.alive, node.frozen_at = False, None
        node.inbox.clear()
        node.generation += 1
        node.epoch += 1
        self.after(NOTICE_S, self.publish)
        self._broken(node.id, Why.RESET)

    def restart(self, number: int) -> None:
        node = self.nodes[node_id(number)]
        if node.alive:
            return
        self.note("RESTART", short(node.id))
        node.alive = True
        self._power(node)
        self.after(RETURN_S, self.publish)

    def freeze(self, number: int) -> None:
        node = self.nodes[node_id(number)]
        if node.responsive:
            self.note("FREEZE", short(node.id))
            node.frozen_at = self.now

    def thaw(self, number: int) -> None:
        node = self.nodes[node_id(number)]
        if node.alive and node.frozen_at is not None:
            self.note("THAW", short(node.id))
            node.frozen_at = None
            inbox, node.inbox = node.inbox, []
            for event in inbox:
                event()
            for one in list(self.running.values()):
                if one.entry == node.id:
                    self._wake(one)

    def evict(self, number: int) -> None:
        sessions = self.nodes[node_id(number)].sessions
        if sessions and sessions.keys():
            session, layers = self.rng.choice(sessions.keys())
            self.note("EVICT", short(node_id(number)), session[-4:], layers)
            sessions.evict(session, layers)

    def cut(self, a: int, b: int) -> None:
        """Nothing passes from a to b any more; a's link notices after its own silence."""
        pair = (node_id(a), node_id(b))
        self.note("CUT", a, b)
        self.cuts.add(pair)

        def lost() -> None:
            if pair in self.cuts:
                self._tell_broken(pair[0], pair[1], Why.SILENT)

        self.after(2.0, lost)

    def mend(self, a: int, b: int) -> None:
        self.note("MEND", a, b)
        self.cuts.discard((node_id(a), node_id(b)))

    def _broken(self, node: NodeId, why: Why) -> None:
        for other in list(self.nodes):
            if other != node:
                self.after(self.latency_s, lambda other=other: self._tell_broken(other, node, why))  # type: ignore[misc] # bound now

    def _tell_broken(self, teller: NodeId, node: NodeId, why: Why, attempt: int | None = None) -> None:
        """The links of ``teller`` to ``node`` are gone."""

        def tell() -> None:
            hops = self.nodes[teller].hops
            for session in list(hops._rooms):
                self._hop_effects(teller, hops.unreachable(session, node, why, attempt))
            for one in list(self.running.values()):
                ticket = one.tickets.get(node, 0)
                if one.entry == teller and ticket and not one.over:
                    self.note("unreachable", short(node), why, "at entry")
                    self._session_effects(one, one.core.unreachable(node, why, self.now, ticket=ticket))

        self.at_node(teller, tell)

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, entry: int, request: GenerationRequest, *, drafts: Drafts | None = None) -> Running:
        number = len(self.running) + 1
        session = SessionId(f"{self.rng.getrandbits(96):024x}{number:08x}")
        planned = self.planner.choose(self.directory, DIGEST, self.num_layers, pinned=request.pinned, now=self.now)
        core = Session(
            session,
            node_id(entry),
            request,
            digest=DIGEST,
            num_layers=self.num_layers,
            route=planned.hops,
            replicas=DirectoryReplicas(self.planner, lambda: self.directory, DIGEST, planned.hops),
            now=self.now,
            drafts=drafts,
        )
        one = Running(core, node_id(entry), self.now, request.deadline_s or 1e9)
        self.running[session] = one
        self.note("REQUEST", session[-4:], "route", [(short(h.node_id), str(h.layers)) for h in planned.hops])
        self._session_effects(one, core.start(self.now))
        return one

    def cancel(self, one: Running) -> None:
        self.note("CANCEL", one.core.session[-4:])
        effects = one.core.cancel()
        one.ended = self.now
        self._session_effects(one, effects)

    # --- time ---------------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay_s, event)

    def at(self, when: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, event))

    def at_node(self, node: NodeId, event: Callable[[], None]) -> None:
        """Run ``event`` when ``node`` can: now, after a thaw, or never."""
        one = self.nodes[node]
        if not one.alive:
            return
        if one.frozen_at is not None:
            one.inbox.append(event)
        else:
            event()

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Advance until ``until()`` or for ``limit_s``."""
        stop = self.now + limit_s
        while not until():
            if not self._heap or self._heap[0][0] > stop:
                self.now = stop
                return until()
            when, _, event = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            event()
        return True

    def idle(self, seconds: float) -> None:
        """Let time pass, timers of hops included."""
        self.run(lambda: False, seconds)

    # --- effects ------------------------------------------------------------------------------------------------------

    def _session_effects(self, one: Running, effects: list) -> None:  # type: ignore[type-arg] # a union
        for effect in effects:
            match effect:
                case Send():
                    self._send(one.entry, effect)
                case Emit():
                    one.tokens += [choice.token for choice in effect.choices]
                    one.token_times += [self.now] * len(effect.choices)
                    self.note("TOKEN", one.core.session[-4:], len(one.tokens), "->", len(one.core.ids))
                case Watch():
                    one.tickets[effect.node] = effect.ticket
                    self._watch(one, effect)
                case Failover():
                    one.failovers += 1
                    route = [(short(h.node_id), str(h.layers)) for h in effect.route]
                    self.note("FAILOVER", one.core.session[-4:], "hedge" if effect.hedge else "", route)
                case Recovered():
                    self.note("RECOVERED", effect.recovery)
                case Finish():
                    one.finished, one.ended = effect.reason, self.now
                    self.note("FINISH", one.core.session[-4:], effect.reason)
                case Fail():
                    one.error, one.ended = effect.error, self.now
                    self.note("FAIL", one.core.session[-4:], repr(effect.error))
        if not one.over:
            self._wake(one)

    def _wake(self, one: Running) -> None:
        one.wake += 1
        wake = one.wake

        def tick() -> None:
            if one.wake != wake or one.over:
                return
            self._hear(one)
            if self.now >= one.core.deadline():
                self._session_effects(one, one.core.tick(self.now))
            else:
                self._wake(one)

        due = one.core.deadline()
        self.at(max(due, self.now), lambda: self.at_node(one.entry, tick))  # not now + (due - now): that rounds

    def _hear(self, one: Running) -> None:
        """What the entry's links know: PONGs come while a node runs and the way is open."""
        for node in one.tickets:
            other = self.nodes[node]
            if (node, one.entry) in self.cuts or (one.entry, node) in self.cuts:
                continue
            if other.responsive:
                one.core.heard(node, self.now)
            elif other.alive and other.frozen_at is not None:
                one.core.heard(node, other.frozen_at)

    def _watch(self, one: Running, watch: Watch) -> None:
        if self.nodes[watch.node].alive:
            return

        def refused() -> None:
            if not one.over:
                effects = one.core.unreachable(watch.node, Why.REFUSED, self.now, ticket=watch.ticket)
                self._session_effects(one, effects)

        self.after(2 * self.latency_s, lambda: self.at_node(one.entry, refused))

    def _wake_hops(self, one: SimNode) -> None:
        """Have the node's hops ticked when they want it."""
        due = one.hops.deadline()
        if due >= one.wake_at:
            return
        one.wake_at = due

        def tick() -> None:
            if one.wake_at == due:
                one.wake_at = math.inf
                self._hop_effects(one.id, one.hops.tick(self.now))
                self._wake_hops(one)

        self.at(max(due, self.now), lambda: self.at_node(one.id, tick))

    def _hop_effects(self, node: NodeId, effects: list) -> None:  # type: ignore[type-arg] # a union
        for effect in effects:
            match effect:
                case Send():
                    self._send(node, effect)
                case Begin() | Compute() | ReadLog():
                    self._work(node, effect)
                case Forget():
                    self.nodes[node].forgotten[effect.session] += 1  # what is under way for it is cancelled
                    sessions = self.nodes[node].sessions
                    if sessions is not None:
                        sessions.drop(effect.session)

    def _work(self, node: NodeId, job: Begin | Compute | ReadLog) -> None:
        one = self.nodes[node]
        epoch, forgotten, delay = one.epoch, one.forgotten[job.session], 0.0
        if not isinstance(job, ReadLog):
            delay = one.step_s * self.rng.uniform(0.8, 1.2)

        def settle() -> None:
            if one.epoch != epoch or one.sessions is None or one.forgotten[job.session] != forgotten:
                return
            outcome = _outcome(one.sessions, job, self.now)
            self._hop_effects(node, one.hops.settle(job, outcome, self.now))
            self._wake_hops(one)

        self.after(delay, lambda: self.at_node(node, settle))

    def _send(self, source: NodeId, send: Send) -> None:
        to, message = send.to, send.message
        kind = type(message).__name__
        if to != source:
            self.messages[kind] += 1
        self.note("send", short(source), "->", short(to), message)
        if (source, to) in self.cuts:
            return
        if to == source:
            self.after(0.0, lambda: self.at_node(to, lambda: self._deliver(source, to, message)))
            return
        if not self.nodes[to].alive:
            attempt = getattr(message, "attempt", None)
            self.after(2 * self.latency_s, lambda: self._tell_broken(source, to, Why.REFUSED, attempt))
            return
        for delay in self.lossy() if self.lossy else [0.0]:
            at = self.now + self.latency_s * self.rng.uniform(0.5, 1.5) + delay
            if not delay:  # a link is ordered; only what a test delays on purpose overtakes
                at = max(at, self._busy_until.get((source, to), 0.0))
                self._busy_until[source, to] = at
            epoch = self.nodes[to].epoch

            def arrive(epoch: int = epoch) -> None:
                if self.nodes[to].epoch == epoch:
                    self.at_node(to, lambda: self._deliver(source, to, message))

            self.at(at, arrive)

    def _deliver(self, source: NodeId, to: NodeId, message: ChainMessage) -> None:
        if isinstance(message, Reply | Lost | Progress | Opened) or (
            isinstance(message, Need) and message.origin is None
        ):
            one = self.running.get(message.session)
            if one is not None and one.entry == to and not one.over:
                self._session_effects(one, one.core.receive(message, source, self.now))
            return
        self._hop_effects(to, self.nodes[to].hops.receive(message, source, self.now))
        self._wake_hops(self.nodes[to])


def _outcome(sessions: HashSessions, job: Begin | Compute | ReadLog, now: float) -> Outcome:
    if isinstance(job, Begin):
        return Kept(sessions.open(job.opening, now))
    try:
        if isinstance(job, Compute):
            return sessions.run(job.run, now)
        return Rows(sessions.boundary(job.session, job.layers, job.start, job.end))
    except NeedRows as error:
        return Missing(error.have)
    except Busy as error:
        return Failed(Why.FULL, error.message)
    except RangeNotHeld as error:
        return Failed(Why.STALE, error.message)


def _word(word: object) -> str:
    """A message as its kind and what orders it."""
    if not isinstance(word, ChainMessage):
        return str(word)
    text = type(word).__name__
    for name in (
        "attempt",
        "seq",
        "layers",
        "origin",
        "start",
        "n",
        "emit",
        "have",
        "upto",
        "end",
        "phase",
        "why",
        "guess",
    ):
        if getattr(word, name, ()) != ():
            text += f" {name}={getattr(word, name)}"
    return text
