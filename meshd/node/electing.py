"""The election's shell: feeds the elector what this node sees, and carries out what it decides.

Owns the timer, the hold questions over links, and the translation between adverts and claims. A claim travels in the owner's
advert (`loading`, stage ``claimed``): adverts are signed by their owner and reach everybody as rumours, which is all that a claim
needs, so it has no message of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import trio

from meshd.directory import Directory, Member
from meshd.election.claims import Claim
from meshd.election.elect import smallest_layer_mb
from meshd.election.elector import AnswerHold, AskHold, Drop, Effect, Elector, Load, SendClaim
from meshd.election.holds import HoldAnswer, hold_answer_untrusted, hold_request_untrusted
from meshd.election.settings import Settings
from meshd.election.view import RoomView
from meshd.errors import MeshdError
from meshd.eventlog import EventLog
from meshd.inference.keeper import StageKeeper
from meshd.links.wire import Links, Message, Stream
from meshd.routing.overclaim import as_delivered
from meshd.vocabulary import Advert, LayerRange, Loading, ModelSpec, NodeId, NodeStatus

HOLD: Final = "election.hold"
ANSWER_S: Final = 5.0
LOOK_S: Final = 0.5  # claims are renewed and stalls noticed at least so often
_PRESENT: Final = (NodeStatus.ALIVE, NodeStatus.SUSPECT)


class Electing:
    """One node's election for one model. Run it in a nursery. ``on_claim`` is called when `claim` or `reason` changed."""

    def __init__(
        self,
        me: NodeId,
        spec: ModelSpec,
        settings: Settings,
        *,
        epoch: int,
        pinned: LayerRange | None,
        resume: LayerRange | None,
        keeper: StageKeeper,
        links: Links,
        directory: Callable[[], Directory],
        log: EventLog,
        on_claim: Callable[[], None],
        remember: Callable[[LayerRange], None],
    ) -> None:
        self._me, self._spec, self._settings = me, spec, settings
        self._keeper, self._links, self._directory, self._log = keeper, links, directory, log
        self._on_claim, self._remember = on_claim, remember
        self._elector = Elector(
            me,
            spec,
            settings,
            rng=random.Random(),  # noqa: S311 - spreads decisions, guards nothing
            now=trio.current_time(),
            epoch=epoch,
            pinned=pinned,
            resume=resume,
        )
        self._sleep = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._answers: dict[int, HoldAnswer] = {}
        self._remembered: LayerRange | None = None
        self._changed_range = trio.Event()
        self._shown_reason = ""
        self.claim: Loading | None = None
        keeper.report_to(self)

    @property
    def reason(self) -> str:
        """Why this node holds nothing, if there is something to say."""
        decision = self._elector.decision
        if decision.why == "small":
            need_mb = smallest_layer_mb(self._spec, self._settings)
            return f"too small for one layer of {self._spec.name}: {decision.short_mb} MB short ({need_mb} MB needed)"
        return ""

    async def run(self) -> None:
        """Decide until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._write_ranges)
            while True:
                self._look()
                self._carry(self._elector.tick(trio.current_time()))
                self._show_reason()
                deadline = min(self._elector.deadline(), trio.current_time() + LOOK_S)
                with trio.CancelScope(deadline=deadline) as self._sleep:
                    await trio.sleep_forever()

    def _show_reason(self) -> None:
        if self.reason != self._shown_reason:
            self._shown_reason = self.reason
            self._on_claim()

    async def serve_hold(self, peer: NodeId, message: Message, stream: Stream) -> None:
        """A peer asks whether this node stays. Raises what a damaged question is."""
        request = hold_request_untrusted(message.head)
        self._carry(self._elector.receive(request, peer, trio.current_time()))
        answer = self._answers.pop(request.ask_id, HoldAnswer(request.ask_id, granted=False))
        await stream.send(Message(HOLD, answer.wire()))
        await stream.end()

    # --- what the keeper reports --------------------------------------------------------------------------------------

    def progressed(self, progress: float) -> None:
        self._carry(self._elector.progressed(progress, trio.current_time()))

    def loaded(self, layers: LayerRange) -> None:
        self._look()
        self._carry(self._elector.loaded(layers, trio.current_time()))

    def failed(self, layers: LayerRange, reason: str) -> None:
        self._log.emit("failed", level="error", reason=reason)
        self._carry(self._elector.failed(layers, trio.current_time()))

    def dropped(self, layers: LayerRange) -> None:
        self._carry(self._elector.dropped(layers, trio.current_time()))

    def lost(self, layers: LayerRange, reason: str) -> None:
        self._log.emit("failed", level="error", reason=reason)
        self._carry(self._elector.lost(layers, trio.current_time()))

    # --- in and out ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Show the elector the room as it is."""
        now, present = trio.current_time(), taking_part(self._directory())
        view = RoomView(
            adverts=tuple(as_delivered(member) for member in present),
            admitted=frozenset(member.node_id for member in present if member.admitted),
            suspects=frozenset(member.node_id for member in present if member.state is NodeStatus.SUSPECT),
        )
        effects = self._elector.room(view, now)
        for member in present:
            if member.node_id != self._me:
                effects += self._elector.receive(claim_of(member.advert), member.node_id, now)
        self._carry(effects)

    def _carry(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendClaim(claim):
                    self._set_claim(claim)
                case Load(layers, beside, why):
                    self._log.emit(
                        "stage", text=f"takes {layers} ({why})", layers=layers.json(), beside=beside, why=why
                    )
                    self._keeper.load(layers)
                case Drop(layers):
                    self._log.emit("stage", text=f"drops {layers}", layers=layers.json(), why="drop")
                    self._keeper.drop(layers)
                case AskHold(peer, request):
                    if self._nursery is not None:
                        self._nursery.start_soon(self._ask, peer, Message(HOLD, request.wire()))
                case AnswerHold(_, answer):
                    self._answers[answer.ask_id] = answer
        if self._elector.taking is None:
            self._show_claim(None)  # what was claimed is held now, or given up
        self._remember_held()
        self._sleep.deadline = min(self._sleep.deadline, self._elector.deadline())

    def _remember_held(self) -> None:
        """Written when it changes, and not forgotten when an engine dies: that range is what this node comes back to."""
        held = self._elector.held
        if held is not None and held != self._remembered:
            self._remembered = held
            self._changed_range.set()

    async def _write_ranges(self) -> None:
        """In a thread: the disk may have a whole model to write before it syncs a line, and whoever stands still is suspect."""
        while True:
            await self._changed_range.wait()
            self._changed_range = trio.Event()
            if self._remembered is not None:
                await trio.to_thread.run_sync(self._remember, self._remembered)

    async def _ask(self, peer: NodeId, question: Message) -> None:
        try:
            with trio.move_on_after(ANSWER_S):
                link = await self._links.get(peer)
                stream = await link.open(question)
                try:
                    answer = await stream.receive()
                finally:
                    stream.cancel()
                if answer is not None:
                    given = hold_answer_untrusted(answer.head)
                    self._look()  # what was a gap when the question went out may be filled
                    self._carry(self._elector.receive(given, peer, trio.current_time()))
        except MeshdError:
            pass  # no answer: the elector's own deadline says what that means

    def _set_claim(self, claim: Claim) -> None:
        self._show_claim(Loading(claim.layers, "claimed", claim.progress) if claim.layers is not None else None)

    def _show_claim(self, loading: Loading | None) -> None:
        if loading != self.claim:
            if loading is not None and (self.claim is None or loading.layers != self.claim.layers):
                self._log.emit("claim", text=f"claims {loading.layers}", layers=loading.layers.json())
            self.claim = loading
            self._on_claim()


def taking_part(directory: Directory) -> list[Member]:
    """Who counts in the election: whoever is present, was not refused and speaks our wire. Nobody asks a node whose layers
    compute wrongly, or whose version is too far away; counted as a replica it would keep its range from being filled."""
    return [
        member
        for member in directory.members.values()
        if member.state in _PRESENT and member.admitted is not False and member.incompatible is None
    ]


def claim_of(advert: Advert) -> Claim:
    """The claim that an advert carries; one without layers withdraws."""
    loading = advert.loading
    return Claim(
        advert.node_id,
        advert.epoch,
        advert.generation,
        advert.digest,
        loading.layers if loading is not None else None,
        moving=advert.layers is not None,
        progress=0.0 if loading is None or loading.stage == "claimed" else max(loading.progress, 0.001),
    )


def shown(held_loading: Loading | None, claim: Loading | None) -> Loading | None:
    """What the advert says is being taken: the load, once there is one, else the claim."""
    if held_loading is not None:
        return held_loading
    return replace(claim, progress=0.0) if claim is not None else None
