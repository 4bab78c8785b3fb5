"""Verdicts: what they are about, when they are asked for again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from meshd.admission.book import MAX_OUT, NEVER, OVERDUE_S, PROBE_S, ProbeGate, Subject, VerdictBook, subject_of
from meshd.vocabulary import Advert, Capability, LayerRange
from tests.election.specs import advert, node

ME = node(1)


def peer(number: int = 2, *, layers: tuple[int, int] | None = (0, 15), generation: int = 1) -> Advert:
    return replace(advert(number, 200, layers), generation=generation)


def book_of(*adverts: Advert, now: float = 0.0) -> VerdictBook:
    book = VerdictBook(ME)
    book.observe(adverts, now)
    return book


def probe(book: VerdictBook, now: float = 0.0) -> Subject:
    subject = book.next_probe("d", now)
    assert subject is not None
    return subject


def test_nobody_is_admitted_before_a_probe_and_the_proven_stay_so() -> None:
    book = book_of(peer())
    assert book.verdict(peer()) == (None, "not yet probed")
    assert book.passed(probe(book))
    assert book.verdict(peer()) == (True, "probed")
    assert book.next_probe("d", 1e6) is None
    assert book.deadline("d") == NEVER


@pytest.mark.parametrize(
    "other",
    [
        peer(generation=2),
        peer(layers=(0, 16)),
        replace(peer(), epoch=2),
        replace(peer(), digest="other"),
        peer(3),
    ],
)
def test_a_verdict_is_about_one_start_of_one_range_of_one_model(other: Advert) -> None:
    book = book_of(peer())
    book.passed(probe(book))
    assert book.verdict(other)[0] is None
    book.observe([other], 1.0)
    assert book.verdict(other)[0] is None
    assert book.verdict(peer())[0] is None, "what is gone is forgotten"


def test_an_answer_about_an_earlier_start_is_dropped() -> None:
    book = book_of(peer())
    old = probe(book)
    book.observe([peer(generation=2)], 1.0)
    assert not book.passed(old)
    assert book.verdict(peer(generation=2)) == (None, "not yet probed")
    fresh = probe(book, 1.0)
    assert not book.passed(old)
    assert book.passed(fresh)


def test_one_probe_at_a_time_and_newcomers_first() -> None:
    book = book_of(peer(2), peer(3))
    first = probe(book)
    assert book.next_probe("d", 0.0) is None
    book.failed(first, "rows are off", 0.0)
    book.passed(probe(book))
    book.observe([peer(2), peer(3), peer(4)], 100.0)
    assert probe(book, 100.0).node_id == node(4)


def test_a_silent_peer_holds_up_the_others_for_a_moment_only() -> None:
    book = book_of(*(peer(i) for i in range(2, 13)))
    silent = [probe(book, i * OVERDUE_S) for i in range(MAX_OUT)]
    assert len(set(silent)) == MAX_OUT
    full = MAX_OUT * OVERDUE_S
    assert book.next_probe("d", full) is None, "so many and no more"
    assert book.deadline("d") == PROBE_S, "until the first is given up"
    assert book.passed(silent[3]), "late is not wrong"
    other = probe(book, full)
    assert other not in silent
    assert book.passed(other)
    assert probe(book, full), "an answer makes room at once"


def test_a_device_is_waited_for_as_long_as_it_says_that_its_layers_take() -> None:
    slow = replace(peer(), capability=Capability(layer_ms_64=200.0))  # 60 s for 15 layers
    book = book_of(slow)
    subject = probe(book)
    book.observe([slow], 79.0)
    assert book.next_probe("d", 79.0) is None, "not a second probe beside the first"
    assert book.passed(subject)
    boaster = replace(peer(3), capability=Capability(layer_ms_64=1e300))
    book.observe([slow, boaster], 100.0)
    probe(book, 100.0)
    assert book.deadline("d") < 400.0, "nobody is waited for for ever"


def test_failures_are_asked_again_ever_later_and_may_be_mended() -> None:
    book, now = book_of(peer()), 0.0
    pauses = []
    for _ in range(9):
        book.failed(probe(book, now), "rows are off", now)
        assert book.verdict(peer()) == (False, "rows are off")
        pauses.append(book.deadline("d") - now)
        assert book.next_probe("d", book.deadline("d") - 0.01) is None
        now = book.deadline("d")
    assert pauses[:4] == pytest.approx([5.0, 10.0, 20.0, 40.0])
    assert pauses[-1] == pytest.approx(300.0)
    book.passed(probe(book, now))
    assert book.verdict(peer())[0] is True


def test_a_probe_that_could_not_be_made_is_no_verdict_and_is_tried_again_soon() -> None:
    book = book_of(peer())
    book.unavailable(probe(book), "link lost", 0.0)
    assert book.verdict(peer()) == (None, "not yet probed: link lost")
    assert book.deadline("d") == pytest.approx(0.5)
    book.failed(probe(book, 0.5), "rows are off", 0.5)
    book.unavailable(probe(book, 6.0), "busy", 6.0)
    assert book.verdict(peer()) == (False, "rows are off"), "a lost link does not clear anybody"


def test_a_probe_whose_task_died_is_given_up() -> None:
    book = book_of(peer())
    lost = probe(book)
    assert book.deadline("d") == PROBE_S
    again = probe(book, PROBE_S)
    assert again == lost
    book.observe([peer()], 3 * PROBE_S)
    assert not book.passed(again), "too late"


def test_a_running_node_that_computes_something_wrong_is_quarantined_then_probed_again() -> None:
    book = book_of(peer())
    subject = probe(book)
    book.passed(subject)
    assert book.quarantine(subject, "disagrees with two", 10.0)
    assert not book.quarantine(subject, "again", 10.0)
    assert book.verdict(peer()) == (False, "disagrees with two")
    assert book.next_probe("d", 69.9) is None
    book.passed(probe(book, 70.0))
    assert book.verdict(peer())[0] is True


def test_without_admission_everybody_with_layers_is_taken_at_their_word() -> None:
    book = VerdictBook(ME, enabled=False)
    book.observe([peer()], 0.0)
    assert book.verdict(peer()) == (True, "admission is off")
    assert book.verdict(peer(layers=None)) == (None, "holds no layers")
    assert book.next_probe("d", 0.0) is None
    assert subject_of(peer(layers=None)) is None


def test_the_deadline_always_has_something_to_do() -> None:
    rng = Random(3)
    book, now = book_of(peer(2), peer(3), peer(4)), 0.0
    for _ in range(200):
        due = book.deadline("d")
        if due == NEVER:
            break
        now = max(now, due)
        subject = probe(book, now)
        action = rng.choice([book.failed, book.unavailable, None])
        if action is not None:
            action(subject, "x", now)
    assert now > 100.0


def test_a_node_is_probed_by_one_peer_at_a_time() -> None:
    gate = ProbeGate()
    assert gate.enter(node(2), 0.0)
    assert not gate.enter(node(3), 1.0)
    assert gate.enter(node(2), 1.0), "it starts over"
    gate.leave(node(3))
    assert not gate.enter(node(3), 2.0)
    gate.leave(node(2))
    assert gate.enter(node(3), 2.0)
    assert gate.enter(node(4), 2.0 + PROBE_S), "a place not left in time is free"


def test_subjects_sort() -> None:
    assert Subject(node(1), 1, 1, LayerRange(0, 3), "d") < Subject(node(1), 1, 2, LayerRange(0, 3), "d")
