"""Claims and holds: what stands, what is void, who may leave, what bytes may say."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.election.claims import Claim, ClaimBook
from meshd.election.elector import AnswerHold, AskHold, Drop, Effect, Elector, Load, SendClaim
from meshd.election.holds import (
    Grants,
    HoldAnswer,
    HoldRequest,
    hold_answer_untrusted,
    hold_request_untrusted,
    whom_to_ask,
)
from meshd.election.settings import Settings
from meshd.election.view import RoomView
from meshd.errors import BadFrame
from meshd.vocabulary import Advert, LayerRange, Loading, ModelSpec
from tests.election.specs import advert, hash_spec, node, spec

S = Settings()
HALF, OTHER = LayerRange(0, 15), LayerRange(15, 30)


def claim(number: int = 1, layers: LayerRange | None = HALF, **more: Any) -> Claim:
    return Claim(node(number), 1, 1, "d", layers, **more)


def standing(book: ClaimBook, now: float, suspects: frozenset[Any] = frozenset()) -> list[Claim]:
    return book.standing("d", {node(1), node(2)}, suspects, now)


def test_a_claim_stands_for_its_time_and_is_renewed() -> None:
    book = ClaimBook(S)
    book.receive(claim(), 0.0)
    assert standing(book, 9.9) == [claim()]
    assert standing(book, 10.0) == []
    book.receive(claim(), 10.0)
    book.receive(claim(progress=0.5), 15.0)
    assert standing(book, 24.9) == [claim(progress=0.5)]


def test_a_claim_without_progress_is_void_however_often_it_is_repeated() -> None:
    book = ClaimBook(S)
    for now in range(0, 29, 3):
        book.receive(claim(progress=0.1), float(now))
    assert standing(book, 29.9)
    book.receive(claim(progress=0.1), 29.9)
    assert standing(book, 30.0) == []
    book = ClaimBook(S)
    for now in range(0, 100, 3):
        book.receive(claim(progress=now / 100), float(now))
    assert standing(book, 100.0)


def test_claims_of_suspects_strangers_and_other_models_do_not_count() -> None:
    book = ClaimBook(S)
    book.receive(claim(), 0.0)
    book.receive(claim(3), 0.0)
    book.receive(replace(claim(2), digest="other"), 0.0)
    assert standing(book, 1.0) == [claim()]
    assert standing(book, 1.0, frozenset({node(1)})) == []


def test_a_newer_run_replaces_and_an_older_one_changes_nothing() -> None:
    book = ClaimBook(S)
    newer = replace(claim(), epoch=2, layers=OTHER)
    book.receive(newer, 0.0)
    book.receive(claim(), 1.0)
    assert standing(book, 2.0) == [newer]
    book.receive(replace(newer, layers=None), 3.0)
    assert standing(book, 3.0) == []


def test_promises_forbid_leaving_until_they_end() -> None:
    grants = Grants(60.0)
    assert grants.grant(node(1), LayerRange(5, 10), 0.0)
    assert grants.forbids((HALF,), 59.9)
    assert not grants.forbids((HALF,), 60.0)
    assert not grants.forbids((LayerRange(10, 15),), 1.0)
    for number in range(200):
        grants.grant(node(number), HALF, 1.0)
    assert not grants.grant(node(999), HALF, 1.0)


def test_whom_to_ask_covers_what_is_left_or_says_nobody() -> None:
    replicas = {node(2): LayerRange(0, 8), node(3): LayerRange(6, 15), node(4): LayerRange(0, 3)}
    assert whom_to_ask((HALF,), replicas) == [(node(2), LayerRange(0, 8)), (node(3), LayerRange(8, 15))]
    assert whom_to_ask((LayerRange(0, 16),), replicas) is None
    assert whom_to_ask((), replicas) == []


KEYS = ["ask", "range", "granted", "x"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40)
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner))


@given(st.dictionaries(st.sampled_from(KEYS), PLAIN))
def test_whatever_arrives_is_read_or_refused_by_name(data: dict[str, object]) -> None:
    for read in (hold_request_untrusted, hold_answer_untrusted):
        with contextlib.suppress(BadFrame):
            read(data)


def test_what_is_sent_is_read() -> None:
    assert hold_request_untrusted(HoldRequest(7, HALF).wire()) == HoldRequest(7, HALF)
    assert hold_answer_untrusted(HoldAnswer(7, False).wire()) == HoldAnswer(7, False)


@pytest.mark.parametrize(
    "change",
    [
        {"ask": -1},
        {"ask": True},
        {"ask": 1 << 63},
        {"range": [3, 3]},
        {"range": [0, 1 << 40]},
        {"range": "0..15"},
        {"range": None},
    ],
)
def test_questions_out_of_bounds(change: dict[str, object]) -> None:
    with pytest.raises(BadFrame):
        hold_request_untrusted({**HoldRequest(7, HALF).wire(), **change})


class Play:
    """One elector, told about a room by hand."""

    def __init__(
        self,
        number: int,
        *adverts: Advert,
        held: LayerRange | None = None,
        settings: Settings = S,
        model: ModelSpec | None = None,
    ) -> None:
        self.number, self.now = number, 0.0
        self.elector = Elector(node(number), model or spec(), settings, rng=Random(1), now=0.0, resume=held)
        self.sent: list[Effect] = []
        if held is not None:
            self.room(*(a for a in adverts if a.node_id == node(number)))
            self.until(Load)
            self.elector.loaded(held, self.now)
        self.room(*adverts)

    def room(self, *adverts: Advert, suspects: frozenset[Any] = frozenset()) -> None:
        admitted = frozenset(a.node_id for a in adverts if a.layers)
        self.elector.room(RoomView(adverts, admitted, suspects), self.now)

    def until(self, kind: type) -> Any:
        """Let time run until an effect of that kind."""
        for _ in range(300):
            before = self.elector.deadline()
            self.now = max(self.now, before)
            effects = self.elector.tick(self.now)
            assert effects or self.elector.deadline() > before, "a tick at its deadline makes progress"
            for effect in effects:
                if isinstance(effect, kind):
                    return effect
        raise AssertionError(f"no {kind.__name__}")


def spare(number: int = 1, *, me: int = 1) -> Play:
    """A replica of 0..15 in a room that has a spare one of those and none of 15..30."""
    others = [advert(n, 200, (0, 15)) for n in (2, 3) if n != me]
    return Play(me, advert(me, 200), *others, held=HALF)


def test_a_mover_claims_asks_drops_loads() -> None:
    play = spare()
    sent = play.until(SendClaim)
    assert (sent.claim.layers, sent.claim.moving) == (OTHER, True)
    ask = play.until(AskHold)
    assert ask.request.layers == HALF
    assert play.elector.held == HALF
    dropped = play.elector.receive(HoldAnswer(ask.request.ask_id, granted=True), ask.peer, play.now)
    assert dropped == [Drop(HALF)]
    (announced, load) = play.elector.dropped(HALF, play.now)
    assert isinstance(announced, SendClaim)
    assert load == Load(OTHER, beside=False, why="gap")
    assert play.elector.loaded(OTHER, play.now) == []
    assert play.elector.held == OTHER


def test_no_promise_no_move() -> None:
    for answer in (False, None):
        play = spare()
        ask = play.until(AskHold)
        if answer is None:
            play.now += S.hold_answer_s
            play.elector.tick(play.now)
        else:
            play.elector.receive(HoldAnswer(ask.request.ask_id, granted=False), ask.peer, play.now)
        assert play.elector.held == HALF
        assert play.elector.taking is None


def test_layers_that_another_only_loads_are_not_left() -> None:
    """The room is broken and 10..15 are nobody else's, so they may reload; 0..10 may not go before somebody serves them."""
    play = Play(1, advert(1, 200), advert(2, 200, loading=(0, 10)), held=HALF)
    assert play.until(SendClaim).claim.moving
    for _ in range(20):
        play.now = max(play.now, play.elector.deadline())
        assert not any(isinstance(effect, Drop | Load) for effect in play.elector.tick(play.now))
        play.room(advert(1, 200), advert(2, 200, loading=(0, 10)))
    assert play.elector.held == HALF


def test_an_answer_to_another_question_is_no_promise() -> None:
    play = spare()
    ask = play.until(AskHold)
    assert play.elector.receive(HoldAnswer(ask.request.ask_id + 1, granted=True), ask.peer, play.now) == []
    assert play.elector.taking == (OTHER, "asking", 0.0)


def answered(effects: list[Effect]) -> bool:
    (answer,) = (effect.answer for effect in effects if isinstance(effect, AnswerHold))
    return answer.granted


def test_both_asking_the_lower_id_wins() -> None:
    play = spare(me=2)
    play.until(AskHold)
    assert not answered(play.elector.receive(HoldRequest(1, HALF), node(3), play.now))
    assert play.elector.taking is not None
    assert answered(play.elector.receive(HoldRequest(1, HALF), node(1), play.now))
    assert play.elector.taking is None, "who promised to stay gives its own question up"


def test_a_node_promises_only_what_it_holds_and_keeps() -> None:
    play = spare()
    assert not answered(play.elector.receive(HoldRequest(1, OTHER), node(2), play.now))
    ask = play.until(AskHold)
    play.elector.receive(HoldAnswer(ask.request.ask_id, granted=True), ask.peer, play.now)
    assert not answered(play.elector.receive(HoldRequest(2, HALF), node(2), play.now)), "it is leaving"


def test_a_node_that_promised_does_not_move_for_a_minute() -> None:
    play = spare()
    assert answered(play.elector.receive(HoldRequest(1, HALF), node(2), play.now))
    promised = play.now
    play.until(SendClaim)
    assert play.now >= promised + 60.0


def test_a_claim_that_wins_makes_the_others_look_again() -> None:
    slow = [advert(n, 200, (0, 15), layer_ms=3.0) for n in (2, 4)]
    adverts = [advert(1, 200), *slow, advert(5, 200, (15, 30))]
    play = Play(1, *adverts)
    assert play.until(SendClaim).claim.layers == OTHER
    play.elector.receive(claim(3, OTHER, progress=0.5), node(3), play.now)
    play.room(*adverts, advert(3, 200))
    assert play.until(SendClaim).claim.layers == HALF
    assert play.until(Load).layers == HALF


def test_a_free_node_that_never_claims_is_not_waited_for() -> None:
    idle = [advert(n, 5000) for n in (2, 3)]
    play = Play(1, advert(1, 200), *idle)
    first = play.elector.deadline()
    play.now = first + 9.0
    assert play.until(Load).layers == HALF


def test_an_engine_that_died_is_taken_up_again() -> None:
    play = Play(1, advert(1, 200), advert(2, 200, (15, 30)), held=HALF)
    play.elector.lost(HALF, play.now)
    assert play.elector.held is None
    assert play.until(Load).layers == HALF


def test_a_device_that_is_too_small_says_so_and_claims_nothing() -> None:
    play = Play(1, advert(1, 5))
    play.now = play.elector.deadline()
    assert play.elector.tick(play.now) == []
    assert (play.elector.decision.why, play.elector.decision.short_mb) == ("small", 4)


def test_a_node_that_drains_while_its_claim_stands_withdraws_it() -> None:
    play = Play(1, advert(1, 200))
    play.until(SendClaim)
    play.room()  # one that drains is in nobody's view, not even in its own
    assert play.until(SendClaim).claim.layers is None
    assert play.elector.taking is None


def test_a_promise_that_comes_too_late_is_not_made_use_of() -> None:
    """While a mover asked, somebody else filled the gap, or it was told to drain: it stays as it is."""
    filled = advert(1, 200), *(advert(n, 200, (0, 15) if n < 4 else (15, 30)) for n in (2, 3, 4, 5))
    for seen in (filled, ()):
        play = spare()
        ask = play.until(AskHold)
        play.room(*seen)
        effects = play.elector.receive(HoldAnswer(ask.request.ask_id, granted=True), ask.peer, play.now)
        assert not any(isinstance(effect, Drop) for effect in effects)
        assert (play.elector.held, play.elector.taking) == (HALF, None)


WIDE, REST, GIVEN = LayerRange(0, 20), LayerRange(0, 8), LayerRange(8, 20)
SLOW = advert(1, 3000, layer_ms=30.0)


def wide(*others: Advert) -> Play:
    """A slow device on 0..20, cooled down, of which the others of this room would do 8..20 better."""
    play = Play(1, SLOW, held=WIDE, model=hash_spec(30, 100))
    play.now += S.cool_down_s
    play.room(SLOW, *others)
    return play


def shrinking() -> tuple[Play, AskHold]:
    play = wide(advert(2, 3000, (8, 30), layer_ms=3.0))
    ask = play.until(AskHold)
    assert (ask.peer, ask.request.layers) == (node(2), GIVEN)
    return play, ask


def test_a_range_is_not_offered_smaller_while_who_takes_the_rest_only_loads_it() -> None:
    """Nor is it claimed, which the log would tell every half minute for as long as that load takes."""
    loads = advert(2, 3000, (20, 30), layer_ms=3.0, loading=(8, 30))
    play = wide(loads)
    for _ in range(20):
        play.now = play.elector.deadline()
        assert play.elector.tick(play.now) == []
        slowly = Loading(LayerRange(8, 30), "loading", play.now / 1e6)
        play.room(SLOW, replace(loads, loading=slowly))
    assert (play.elector.held, play.elector.taking) == (WIDE, None)
    play.room(SLOW, advert(2, 3000, (8, 30), layer_ms=3.0))
    assert play.until(AskHold).request.layers == GIVEN


def test_a_claimed_smaller_offer_is_withdrawn_when_who_held_the_rest_only_loads_it_now() -> None:
    play = wide(advert(2, 3000, (8, 30), layer_ms=3.0))
    assert play.until(SendClaim).claim.layers == REST
    play.room(SLOW, advert(2, 3000, (20, 30), layer_ms=3.0, loading=(8, 30)))
    play.now = play.elector.deadline()
    (withdrawn,) = play.elector.tick(play.now)
    assert isinstance(withdrawn, SendClaim)
    assert (withdrawn.claim.layers, play.elector.held, play.elector.taking) == (None, WIDE, None)


def test_a_smaller_offer_without_a_promise_changes_nothing() -> None:
    for answer in (False, None):
        play, ask = shrinking()
        if answer is None:
            play.now += S.hold_answer_s
            effects = play.elector.tick(play.now)
        else:
            effects = play.elector.receive(HoldAnswer(ask.request.ask_id, granted=False), ask.peer, play.now)
        assert not any(isinstance(effect, Load | Drop) for effect in effects)
        assert (play.elector.held, play.elector.taking) == (WIDE, None)


def test_a_promised_smaller_offer_is_loaded_and_drops_nothing() -> None:
    play, ask = shrinking()
    (announced, load) = play.elector.receive(HoldAnswer(ask.request.ask_id, granted=True), ask.peer, play.now)
    assert isinstance(announced, SendClaim)
    assert load == Load(REST, beside=True, why="slow")
    assert not answered(play.elector.receive(HoldRequest(1, GIVEN), node(3), play.now)), "it is leaving"
    assert play.elector.loaded(REST, play.now) == []
    assert (play.elector.held, play.elector.taking) == (REST, None)


def test_a_smaller_offer_is_judged_again_when_it_is_promised() -> None:
    for seen in ((SLOW, advert(2, 3000, (20, 30), layer_ms=3.0)), ()):
        play, ask = shrinking()
        play.room(*seen)
        effects = play.elector.receive(HoldAnswer(ask.request.ask_id, granted=True), ask.peer, play.now)
        assert not any(isinstance(effect, Load | Drop) for effect in effects)
        assert (play.elector.held, play.elector.taking) == (WIDE, None)


NO_LANE = replace(S, lane_fraction=0.0, kv_reserve=0.7)


def beside() -> Play:
    """A spare replica of 0..15 that has room for 15..30 beside it, and has begun to load that."""
    play = Play(1, advert(1, 700), *(advert(n, 200, (0, 15)) for n in (2, 3)), held=HALF, settings=NO_LANE)
    load = play.until(Load)
    assert (load.layers, load.beside) == (OTHER, True)
    return play


def loaded_beside() -> tuple[Play, AskHold]:
    play = beside()
    (ask,) = (effect for effect in play.elector.loaded(OTHER, play.now) if isinstance(effect, AskHold))
    assert ask.request.layers == HALF
    return play, ask


def test_an_engine_that_dies_during_a_load_beside_ends_that_load() -> None:
    play = beside()
    assert Drop(OTHER) in play.elector.lost(HALF, play.now)
    assert (play.elector.held, play.elector.taking) == (None, None)


def test_a_report_of_another_range_is_not_taken_for_one_of_what_is_loading() -> None:
    play = beside()
    assert play.elector.failed(HALF, play.now) == []
    assert play.elector.loaded(REST, play.now) == [Drop(REST)], "nobody wants it any more"
    assert play.elector.lost(OTHER, play.now) == []
    assert play.elector.held == HALF
    assert play.elector.taking is not None
    assert play.elector.taking[:2] == (OTHER, "loading")


def test_what_was_loaded_beside_is_held_when_the_old_engine_dies() -> None:
    play, _ = loaded_beside()
    play.elector.lost(HALF, play.now)
    assert (play.elector.held, play.elector.taking) == (OTHER, None)


def test_the_death_of_what_was_given_up_is_no_loss() -> None:
    play, ask = loaded_beside()
    assert Drop(HALF) in play.elector.receive(HoldAnswer(ask.request.ask_id, granted=True), ask.peer, play.now)
    assert play.elector.lost(HALF, play.now) == []
    assert play.elector.held == OTHER
