"""A room of electors on one simulated clock: delayed gossip, loads that take time, deaths, partitions.

`Room.step` asserts what must never happen: that a node stops serving layers of which it was the last replica it can see,
except to reload them in a room that could not answer anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from meshd.election.claims import Claim
from meshd.election.coverage import counts
from meshd.election.elector import AnswerHold, AskHold, Drop, Effect, Elector, Load, SendClaim
from meshd.election.settings import Settings
from meshd.election.view import RoomView
from meshd.vocabulary import Advert, LayerRange, Loading, ModelSpec, NodeId
from tests.election.specs import advert, node

GOSSIP_S = 0.3
SUSPECT_S = 2.0
DEAD_S = 4.0
STEP_S = 0.25


@dataclass(slots=True)
class SimNode:
    elector: Elector
    number: int
    advert: Advert
    group: int = 0
    died_at: float | None = None
    serving: LayerRange | None = None
    beside: LayerRange | None = None  # loaded, and serves once the other is dropped
    loading: LayerRange | None = None
    loads: int = 0
    load_done: float | None = None
    seen: int = -1
    history: list[str] = field(default_factory=list)


class Room:
    """Nodes are numbered from 1."""

    def __init__(
        self, spec: ModelSpec, *, seed: int = 1, settings: Settings | None = None, load_s: float = 4.0
    ) -> None:
        self.spec, self.settings, self.load_s = spec, settings or Settings(), load_s
        self.rng = Random(seed)
        self.now = 0.0
        self.nodes: dict[NodeId, SimNode] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.version = 0
        self.promises: dict[NodeId, SimNode] = {}  # by asker: who promised last
        self.split_at = 0.0
        self.load_fails: Callable[[SimNode], bool] = lambda node_: False  # noqa: ARG005 - nobody fails by default
        self.proves = True  # False: there is nothing to prove anybody with
        self.claims: list[tuple[float, int, LayerRange]] = []  # when, by whom

    # --- scripts ------------------------------------------------------------------------------------------------------

    def join(
        self,
        number: int,
        capacity_mb: float,
        *,
        layer_ms: float = 1.0,
        resume: tuple[int, int] | None = None,
        pinned: tuple[int, int] | None = None,
    ) -> SimNode:
        elector = Elector(
            node(number),
            self.spec,
            self.settings,
            rng=Random(self.rng.random()),
            now=self.now,
            epoch=int(self.now),
            resume=LayerRange(*resume) if resume else None,
            pinned=LayerRange(*pinned) if pinned else None,
        )
        made = SimNode(elector, number, advert(number, capacity_mb, layer_ms=layer_ms))
        self.nodes[node(number)] = made
        self.after(GOSSIP_S, self._changed)
        return made

    def kill(self, number: int) -> None:
        dead = self.nodes[node(number)]
        dead.died_at, dead.serving, dead.beside, dead.loading, dead.load_done = self.now, None, None, None, None
        self.after(SUSPECT_S, self._changed)
        self.after(DEAD_S, self._changed)

    def crash(self, number: int) -> None:
        """The engine that serves dies, and the node lives on: what was loaded beside it serves now."""
        each = self.nodes[node(number)]
        gone = each.serving
        if each.died_at is None and gone is not None:
            each.serving, each.beside = each.beside, None
            each.history.append(f"{self.now:.1f} crash {gone}")
            self._do(each, each.elector.lost(gone, self.now))

    def split(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.nodes[node(number)].group = 1
        self.split_at = self.now
        self.after(SUSPECT_S, self._changed)
        self.after(DEAD_S, self._changed)

    def heal(self) -> None:
        for each in self.nodes.values():
            each.group = 0
        self._changed()

    def prove(self) -> None:
        """From now on there is something to prove everybody with."""
        self.proves = True
        self._changed()

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def run_until(self, condition: Callable[[], bool], within_s: float) -> float:
        """How long it took."""
        began = self.now
        while not condition():
            assert self.now - began < within_s, f"not within {within_s} s: {self.ranges()}"
            self.step()
        return self.now - began

    # --- observations -------------------------------------------------------------------------------------------------

    def alive(self) -> list[SimNode]:
        return [each for each in self.nodes.values() if each.died_at is None]

    def ranges(self) -> dict[int, str]:
        return {each.number: str(each.serving) for each in self.alive()}

    def replicas(self, group: int | None = None) -> list[int]:
        held = [each.serving for each in self.alive() if each.serving and group in (None, each.group)]
        return counts(held, self.spec.num_layers)

    def covered(self) -> bool:
        return min(self.replicas()) > 0

    def as_decided(self) -> bool:
        """Every node runs what its elector believes that it holds, and nothing else beside it."""
        return all(each.serving == each.elector.held and each.beside is None for each in self.alive())

    def at_rest(self) -> bool:
        return all(each.elector.taking is None for each in self.alive())

    def loads(self) -> int:
        return sum(each.loads for each in self.nodes.values())

    # --- the machine --------------------------------------------------------------------------------------------------

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what))

    def step(self) -> None:
        self.now += STEP_S
        while self.events and self.events[0][0] <= self.now:
            heapq.heappop(self.events)[2]()
        for each in self.alive():
            if each.seen != self.version:
                each.seen = self.version
                self._do(each, each.elector.room(self._view(each), self.now))
        for each in self.alive():
            if self.now >= each.elector.deadline():
                self._do(each, each.elector.tick(self.now))

    def _changed(self) -> None:
        self.version += 1

    def _view(self, viewer: SimNode) -> RoomView:
        adverts, suspects = [], set()
        for key, each in self.nodes.items():
            silent = self.now - each.died_at if each.died_at is not None else 0.0
            if each.group != viewer.group:
                silent = max(silent, self.now - self.split_at)
            if silent >= DEAD_S:
                continue
            if silent >= SUSPECT_S:
                suspects.add(key)
            adverts.append(each.advert)
        admitted = frozenset(a.node_id for a in adverts if a.layers is not None and self.proves)
        return RoomView(tuple(adverts), admitted, frozenset(suspects))

    def _publish(self, each: SimNode) -> None:
        taking = each.elector.taking
        loading = Loading(taking[0], taking[1], taking[2]) if taking and taking[1] in {"loading", "restoring"} else None
        fresh = replace(each.advert, layers=each.serving, loading=loading, digest=self.spec.digest)
        if fresh != each.advert:

            def show() -> None:
                each.advert = fresh
                self._changed()

            self.after(GOSSIP_S, show)

    def _reach(self, each: SimNode, other: SimNode) -> bool:
        return each.died_at is None and other.died_at is None and each.group == other.group

    def _do(self, each: SimNode, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendClaim(claim):
                    self._spread(each, claim)
                case Load(layers, beside, why):
                    self._load(each, layers, beside=beside, why=why)
                case Drop(layers):
                    self._drop(each, layers)
                case AskHold(peer, message):
                    self._send(each, peer, message)
                case AnswerHold(peer, message):  # pragma: no branch
                    if message.granted:
                        self.promises[peer] = each
                    self._send(each, peer, message)
        self._publish(each)

    def _spread(self, each: SimNode, claim: Claim) -> None:
        if claim.layers is not None and claim.progress == 0.0:
            self.claims.append((self.now, each.number, claim.layers))
        for other in self.alive():
            if other is not each and self._reach(each, other):
                self._send_later(each, other, claim, self.rng.uniform(0.05, 0.6))

    def _send(self, each: SimNode, peer: NodeId, message: object) -> None:
        self._send_later(each, self.nodes[peer], message, self.rng.uniform(0.01, 0.3))

    def _send_later(self, each: SimNode, other: SimNode, message: object, delay_s: float) -> None:
        def arrive() -> None:
            if self._reach(each, other):
                self._do(other, other.elector.receive(message, node(each.number), self.now))  # type: ignore[arg-type]  # any of three

        self.after(delay_s, arrive)

    def _load(self, each: SimNode, layers: LayerRange, *, beside: bool, why: str) -> None:
        assert beside or each.serving is None, "a worker beside another must have been asked for"
        each.loads += 1
        each.history.append(f"{self.now:.1f} {why} {layers}")
        if each.serving is not None and each.serving.covers(layers):
            self._offer_less(each, layers)
            return
        each.loading, each.load_done = layers, (done := self.now + self.load_s * self.rng.uniform(0.7, 1.3))

        def progress() -> None:
            if each.died_at is None and each.load_done == done and self.now < done:
                self._do(each, each.elector.progressed(1 - (done - self.now) / (2 * self.load_s), self.now))
                self.after(1.0, progress)

        def finish() -> None:
            if each.died_at is not None or each.load_done != done:
                return
            each.loading, each.load_done = None, None
            if self.load_fails(each):
                self._do(each, each.elector.failed(layers, self.now))
                return
            if each.serving is None:
                each.serving = layers
            else:
                each.beside = layers
            self._do(each, each.elector.loaded(layers, self.now))

        self.after(1.0, progress)
        self.after(done - self.now, finish)

    def _offer_less(self, each: SimNode, layers: LayerRange) -> None:
        """A part of what a worker holds needs no load: the rest of it is given up at once, as the keeper does it."""
        self._serve(each, layers)

        def offered() -> None:
            if each.died_at is None:
                self._do(each, each.elector.loaded(layers, self.now))

        self.after(0.0, offered)

    def _drop(self, each: SimNode, layers: LayerRange) -> None:
        if layers == each.loading:
            each.loading, each.load_done = None, None
        elif layers == each.serving:
            beside, each.beside = each.beside, None
            self._serve(each, beside)
            each.history.append(f"{self.now:.1f} drop {layers}")
        elif layers == each.beside:
            each.beside = None

        def unloaded() -> None:
            if each.died_at is None:
                self._do(each, each.elector.dropped(layers, self.now))

        self.after(0.5, unloaded)

    def _serve(self, each: SimNode, layers: LayerRange | None) -> None:
        """From now on ``each`` serves these layers in place of what it served, and no last replica may go with that."""
        before = self.replicas(each.group)
        each.serving = layers
        now = self.replicas(each.group)
        taking = each.elector.taking
        coming = taking[0] if taking and min(before) == 0 else None  # nothing to lose while the room cannot answer
        gone = [i for i, (b, a) in enumerate(zip(before, now, strict=True)) if b and not a]
        lost = [i for i in gone if coming is None or i not in coming]
        promised_by = self.promises.get(node(each.number))
        kept = promised_by is None or self._reach(each, promised_by)  # a promise ends with its giver
        assert not (lost and kept), f"{each.number} dropped the last replica of {lost}: {each.history} {self.ranges()}"
