"""One node's part in the election: claims, loads, moves, as directives for the daemon.

A pure core: `room` (who is there), `receive` (claims and holds), what the daemon reports (`progressed`, `loaded`, `failed`,
`dropped`), and `tick`, which is due at `deadline`. All return effects for the daemon to carry out. The core owns when to claim,
load, ask and drop; it knows nothing of engines, links or gossip. Seconds on the daemon's monotonic clock.

The life of a range: claimed (rumoured, stands ``claim_s``) -> loading -> held. A move claims as well; where old and new fit
beside each other the new range is loaded first, and the old one is dropped once a replica has promised to stay; else the promise
comes first, then drop, load, and the old range again if that fails. A range inside the old one is there already: loading it is
only to offer less, which gives the rest up, so here too the promise comes first, and nothing is dropped before or after.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from meshd.election.capacity import Device, Sizes, weight_budget
from meshd.election.claims import Claim, ClaimBook
from meshd.election.coverage import counts
from meshd.election.elect import Decision, assign
from meshd.election.holds import Grants, HoldAnswer, HoldRequest, whom_to_ask
from meshd.election.rebalance import Move, best_move, still_worth
from meshd.election.settings import Settings
from meshd.election.view import RoomView, Watch
from meshd.vocabulary import LayerRange, ModelSpec, NodeId

NEVER: Final = float("inf")
_ASK_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class SendClaim:
    """Spread this claim as a rumour."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch, load and prove this range; report `progressed`, then `loaded` or `failed`. ``beside``: keep serving the old.

    A range inside the one that is held is only a smaller offer of the same worker: it takes the old one's place at once, and no
    `Drop` follows.
    """

    layers: LayerRange
    beside: bool
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop serving this range: hand its sessions over, unload, report `dropped`."""

    layers: LayerRange


@dataclass(frozen=True, slots=True)
class AskHold:
    """Send this request over the link; an unreachable peer is simply no answer."""

    peer: NodeId
    request: HoldRequest


@dataclass(frozen=True, slots=True)
class AnswerHold:
    """Send this answer over the link."""

    peer: NodeId
    answer: HoldAnswer


Effect = SendClaim | Load | Drop | AskHold | AnswerHold


@dataclass(slots=True)
class _Task:
    """The range that is being taken. ``phase``: claimed, loading, asking, waiting, dropping, restoring; ``due`` ends it."""

    layers: LayerRange
    why: str
    began: float
    due: float
    move: Move | None = None
    phase: str = "claimed"
    progress: float = 0.0
    renew_at: float = 0.0
    open_asks: set[int] = field(default_factory=set)
    tries: int = 0

    def loads(self, layers: LayerRange) -> bool:
        """These are the layers that it waits for."""
        return self.phase in {"loading", "restoring"} and self.layers == layers


class Elector:
    """Decides for one node and one model. ``pinned`` never moves; ``resume`` is what this node held before it restarted."""

    def __init__(
        self,
        me: NodeId,
        spec: ModelSpec,
        settings: Settings,
        *,
        rng: Random,
        now: float,
        epoch: int = 0,
        pinned: LayerRange | None = None,
        resume: LayerRange | None = None,
    ) -> None:
        self.me = me
        self.held: LayerRange | None = None
        self.decision = Decision(None, "settling")
        self._spec, self._sizes, self._settings = spec, Sizes(spec), settings
        self._rng, self._epoch = rng, epoch
        self._pinned, self._resume = pinned, resume
        self._claims, self._grants = ClaimBook(settings), Grants(settings.hold_s)
        self._watch = Watch(me, spec.digest, settings)
        self._settled_at = now if pinned else now + settings.settle_s
        self._consider_at = self._settled_at
        self._cool_at = now
        self._task: _Task | None = None
        self._left: LayerRange | None = None  # what a move gave up, to return to
        self._loaded: LayerRange | None = None  # what the serving engine has in memory: more than it offers, at times
        self._next_ask = 0

    @property
    def taking(self) -> tuple[LayerRange, str, float] | None:
        """The range being taken, its phase and progress; None at rest."""
        return (self._task.layers, self._task.phase, self._task.progress) if self._task else None

    # --- what happens -------------------------------------------------------------------------------------------------

    def room(self, view: RoomView, now: float) -> list[Effect]:
        """Who is there now. Whenever somebody comes, goes or changes range, this node thinks again soon."""
        if self._watch.see(view, now):
            soon = now + self._rng.uniform(0.1, 0.5)
            self._consider_at = min(self._consider_at, max(soon, self._settled_at))
        return []

    def receive(self, message: Claim | HoldRequest | HoldAnswer, source: NodeId, now: float) -> list[Effect]:
        """A claim (from whoever passed it on), or a hold message from the peer itself."""
        if isinstance(message, Claim):
            if message.node_id != self.me:
                self._claims.receive(message, now)
            return []
        if isinstance(message, HoldRequest):
            return self._answer(message, source, now)
        task = self._task
        if task is None or task.phase != "asking" or message.ask_id not in task.open_asks:
            return []
        if not message.granted:
            return self._not_promised(task, now)
        task.open_asks.discard(message.ask_id)
        return [] if task.open_asks else self._promised(task, now)

    def progressed(self, progress: float, now: float) -> list[Effect]:
        """The load has come this far (0..1)."""
        task = self._task
        if task is None or progress <= task.progress:
            return []
        task.progress = min(progress, 1.0)
        return self._announce(task, now)

    def loaded(self, layers: LayerRange, now: float) -> list[Effect]:
        """This range is loaded and proven. What is not wanted any more goes again: nobody else would."""
        task = self._task
        if task is None or not task.loads(layers):
            return [] if layers == self.held else [Drop(layers)]
        if self._in_place(task):
            return self._hold(task, now)
        if self.held is not None and task.move is not None and task.move.leaves:
            return self._ask(task, task.move.leaves, now)
        effects: list[Effect] = [Drop(self.held)] if self.held is not None else []
        return effects + self._hold(task, now)

    def failed(self, layers: LayerRange, now: float) -> list[Effect]:
        """The load of this range did not work out."""
        task = self._task
        if task is None or not task.loads(layers):
            return []
        if task.phase == "loading" and self._left is not None:
            task.phase, task.layers, task.progress = "restoring", self._left, 0.001
            return [*self._announce(task, now), Load(self._left, beside=False, why="restore")]
        return self._give_up(now, self._settings.retry_s)

    def dropped(self, layers: LayerRange, now: float) -> list[Effect]:
        """This range is unloaded."""
        task = self._task
        if task is None or task.phase != "dropping" or layers != self.held:
            return []
        self.held = self._loaded = None
        return self._load(task, beside=False, now=now)

    def lost(self, layers: LayerRange, now: float) -> list[Effect]:
        """The engine that served these layers died. What was loaded beside it serves from now on; what was still being loaded is
        given up, as what was lost is back sooner."""
        if layers != self.held:
            return []  # given up by now
        task, effects = self._task, list[Effect]()
        if task is not None and task.phase in {"asking", "waiting"} and self._loads_first(task):
            effects = self._hold(task, now)
        else:
            if task is not None:
                effects = [Drop(task.layers)] if task.phase == "loading" else []
                effects += self._give_up(now, 0.0)
            self._resume, self.held, self._loaded = layers, None, None
        self._consider_at = now
        return effects

    # --- time ---------------------------------------------------------------------------------------------------------

    def deadline(self) -> float:
        """When `tick` is due."""
        if self._task is None:
            return self._consider_at
        return min(self._task.due, self._task.renew_at)

    def tick(self, now: float) -> list[Effect]:
        task = self._task
        if task is None:
            return self._consider(now) if now >= self._consider_at else []
        effects: list[Effect] = []
        if now >= task.due:
            effects += self._due(task, now)
        if self._task is not None and now >= self._task.renew_at:
            effects += self._announce(self._task, now)
        return effects

    def _due(self, task: _Task, now: float) -> list[Effect]:
        if task.phase == "claimed":
            return self._recheck(task, now)
        if task.phase == "waiting" and task.move is not None:
            return self._ask(task, task.move.leaves, now)
        return self._not_promised(task, now)

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _consider(self, now: float) -> list[Effect]:
        self._consider_at = now + self._settings.move_every_s * self._rng.uniform(0.75, 1.25)
        if self._watch.mine is None:
            return []
        if self.held is None:
            self.decision = self._free_choice(now)
            return self._claim(self.decision.layers, self.decision.why, None, now) if self.decision.layers else []
        self.decision = Decision(self.held, "stay")
        if self._pinned is not None:
            return []
        others = self._others(now)
        move = best_move(
            self._sizes,
            self._watch.device(self.held),
            others,
            self._settings,
            cooled=now >= self._cool_at,
            answers=self._answers(),
            loaded=self._loaded,
        )
        if move is None or self._grants.forbids(move.leaves, now):
            return []
        if move.why != "gap" and whom_to_ask(self._needed(move, now), self._watch.replicas()) is None:
            return []  # nobody proven here could promise to stay: a claim would come to nothing, and so again and again
        return self._claim(move.layers, move.why, move, now)

    def _free_choice(self, now: float) -> Decision:
        if self._pinned is not None:
            return Decision(self._pinned, "pinned")
        others = self._others(now)
        if self._resume is not None and self._useful(self._resume, others):
            return Decision(self._resume, "resume")
        return assign(self._spec, [*others, self._watch.device(None)], self._settings)[self.me]

    def _useful(self, layers: LayerRange, others: Iterable[Device]) -> bool:
        """Fits, and fills something missing if anything is."""
        budget = weight_budget(self._watch.device(None).capacity_mb, self._settings)
        if layers.end > self._sizes.num_layers or self._sizes.bytes(layers.start, layers.end) > budget:
            return False
        replicas = counts((d.layers for d in others if d.layers), self._sizes.num_layers)
        return 0 not in replicas or 0 in replicas[layers.start : layers.end]

    def _still(self, task: _Task, now: float) -> Move | None:
        """The move that ``task`` is, if it still makes the room better and this node has not begun to drain."""
        if self._watch.mine is None:
            return None
        return still_worth(
            self._sizes,
            self._watch.device(self.held),
            self._others(now),
            self._settings,
            task.layers,
            answers=self._answers(),
            loaded=self._loaded,
        )

    def _answers(self) -> bool:
        """Every layer is served now, as far as this node knows."""
        held = [self.held] if self.held is not None else []
        return 0 not in counts([*self._watch.served(), *held], self._sizes.num_layers)

    def _others(self, now: float) -> list[Device]:
        task = self._task
        started = task is not None and task.progress > 0.0
        claims = self._claims.standing(self._spec.digest, self._watch.present, self._watch.suspects, now)
        return self._watch.others(claims, started=started, moving=self.held is not None, now=now)

    def _recheck(self, task: _Task, now: float) -> list[Effect]:
        """The claim has stood long enough: load if it still wins, claim anew or withdraw if not."""
        if self._watch.mine is None:
            return self._give_up(now, self._settings.retry_s)  # this node began to drain since
        if task.move is not None and self.held is not None:
            move = self._still(task, now)
            if move is None or self._grants.forbids(move.leaves, now):
                return self._give_up(now, self._rng.uniform(0.5, 2.0))
            task.move = move
            return self._start_move(task, move, now)
        choice = self._free_choice(now)
        if choice.layers is None:
            return self._give_up(now, self._settings.retry_s)
        # In a room where somebody arrives every second the answer could change for ever; one range too many is harmless.
        patient = now - task.began < 3 * self._settings.claim_s
        if choice.layers != task.layers and patient:
            task.layers, task.why, task.due = choice.layers, choice.why, now + self._settings.claim_s
            return self._announce(task, now)
        task.layers = choice.layers
        return self._load(task, beside=False, now=now)

    # --- doing --------------------------------------------------------------------------------------------------------

    def _claim(self, layers: LayerRange, why: str, move: Move | None, now: float) -> list[Effect]:
        wait_s = 0.0 if self._pinned is not None else self._settings.claim_s
        self._task = _Task(layers, why, began=now, due=now + wait_s, move=move)
        return self._announce(self._task, now)

    def _announce(self, task: _Task, now: float) -> list[Effect]:
        task.renew_at = now + self._settings.claim_valid_s / 3
        return [SendClaim(self._my_claim(task.layers, task.progress, moving=task.move is not None))]

    def _my_claim(self, layers: LayerRange | None, progress: float = 0.0, *, moving: bool = False) -> Claim:
        generation = self._watch.mine.generation if self._watch.mine else 0
        return Claim(self.me, self._epoch, generation, self._spec.digest, layers, moving, progress)

    def _load(self, task: _Task, *, beside: bool, now: float) -> list[Effect]:
        task.phase, task.due, task.progress = "loading", NEVER, 0.001
        return [*self._announce(task, now), Load(task.layers, beside, task.why)]

    def _in_place(self, task: _Task) -> bool:
        """The move only offers less of what is held: nothing has to be loaded, and what is left is left by the load itself."""
        return task.move is not None and self.held is not None and self.held.covers(task.layers)

    def _is_loaded(self, layers: LayerRange) -> bool:
        """More or less of the same engine: the one that serves goes on."""
        if self.held is None or self._loaded is None:
            return False
        return self._loaded.covers(layers) and (layers.covers(self.held) or self.held.covers(layers))

    def _loads_first(self, task: _Task) -> bool:
        """The new range is loaded beside the old one before anybody is asked."""
        return task.move is not None and task.move.beside and not self._in_place(task)

    def _start_move(self, task: _Task, move: Move, now: float) -> list[Effect]:
        if self._loads_first(task):
            return self._load(task, beside=True, now=now)
        needed = self._needed(move, now)
        return self._ask(task, needed, now) if needed else self._promised(task, now)

    def _needed(self, move: Move, now: float) -> tuple[LayerRange, ...]:
        """The layers for which somebody must promise to stay."""
        assert self.held is not None, "only holders move"  # noqa: S101 - checked by the callers
        if move.beside:
            return move.leaves
        replicas = counts((d.layers for d in self._others(now) if d.layers), self._sizes.num_layers)
        # Layers nobody else has come along (or there would be no move), and while they reload the room misses nothing: it
        # cannot answer anyway. Everything else needs a promise, from somebody who serves it and not only loads it.
        sole = 0 in replicas[self.held.start : self.held.end]
        return move.leaves if sole else (self.held,)

    def _ask(self, task: _Task, leaves: tuple[LayerRange, ...], now: float) -> list[Effect]:
        asked = whom_to_ask(leaves, self._watch.replicas())
        if asked is None or self._grants.forbids(leaves, now):
            return self._not_promised(task, now)
        task.phase, task.due = "asking", now + self._settings.hold_answer_s
        effects: list[Effect] = []
        task.open_asks.clear()
        for peer, layers in asked:
            self._next_ask += 1
            task.open_asks.add(self._next_ask)
            effects.append(AskHold(peer, HoldRequest(self._next_ask, layers)))
        return effects

    def _answer(self, request: HoldRequest, asker: NodeId, now: float) -> list[Effect]:
        task, effects = self._task, list[Effect]()
        granted = self.held is not None and self.held.covers(request.layers)
        if task is not None and task.move is not None and granted:
            if task.phase == "asking":
                granted = asker < self.me
            elif task.phase != "claimed" and not self._loads_first(task):
                granted = False
            if granted and task.phase in {"asking", "claimed"}:
                effects += self._not_promised(task, now)
        granted = granted and self._grants.grant(asker, request.layers, now)
        return [AnswerHold(asker, HoldAnswer(request.ask_id, granted)), *effects]

    def _promised(self, task: _Task, now: float) -> list[Effect]:
        """Everybody asked stays: the old range may go."""
        assert self.held is not None, "only holders leave"  # noqa: S101 - the phases' invariant
        old = self.held
        if self._loads_first(task):
            return [Drop(old), *self._hold(task, now)]
        if self._still(task, now) is None:  # the room has changed while the others were asked
            return self._give_up(now, self._rng.uniform(0.5, 2.0))
        if self._in_place(task):
            return self._load(task, beside=True, now=now)
        self._left, task.phase, task.due = old, "dropping", NEVER
        return [Drop(old)]

    def _not_promised(self, task: _Task, now: float) -> list[Effect]:
        """Nobody promised: stay. What was loaded beside the old range waits a little for another answer."""
        task.open_asks.clear()
        if task.phase == "claimed" or not self._loads_first(task):
            return self._give_up(now, self._rng.uniform(0.5, 1.0) * self._settings.move_every_s)
        if task.tries >= _ASK_TRIES:
            return [Drop(task.layers), *self._give_up(now, self._settings.move_every_s)]
        task.phase, task.due, task.tries = "waiting", now + self._settings.hold_answer_s, task.tries + 1
        return []

    def _hold(self, task: _Task, now: float) -> list[Effect]:
        """The range is this node's now. The claim runs out by itself, after everybody has seen the advert."""
        if not self._is_loaded(task.layers):
            self._loaded = task.layers
        self.held, self._task, self._left, self._resume = task.layers, None, None, None
        self.decision = Decision(task.layers, task.why)
        self._cool_at = now + self._settings.cool_down_s
        self._consider_at = now + self._settings.move_every_s * self._rng.uniform(0.5, 1.0)
        return []

    def _give_up(self, now: float, wait_s: float) -> list[Effect]:
        self._task, self._left = None, None
        self._consider_at = now + wait_s
        return [SendClaim(self._my_claim(None))]
