"""What a stream decides: where to go next, with what, and when to give up. No socket, no clock."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from meshd.client.answer import FULL_S, LATE_S, PAUSE_S, SILENCE_S, Answer, Patience, Pause, Piece, Post, Race
from meshd.client.entries import Entries, NoEntry, RequestFailed

GONE = json.dumps({"error": {"code": "stage_unavailable", "message": "stage 15..30 unavailable"}}).encode()
START = {"id": "s1", "seed": 7, "digest": "d1", "model": "m", "route": [{"name": "n1"}, {"name": "n2"}]}
END = {
    "tokens": [4],
    "text": "d",
    "finish_reason": "length",
    "route": [{"name": "n1", "layers": [0, 30]}],
    "routing": {"mode": "cold"},
    "recoveries": [],
    "timings": {"tokens_per_s": 9.5},
}


def said(**event: Any) -> str:
    return "data: " + json.dumps(event)


def answer(count: int = 3, *, patience_s: float = 10.0, **request: Any) -> tuple[Answer, Entries]:
    entries = Entries([f"http://e{i}" for i in range(count)])
    return Answer(entries, {"prompt": "x", **request}, Patience(patience_s=patience_s), 0.0), entries


def posted(one: Answer, now: float = 0.0) -> Post:
    todo = one.next(now)
    assert isinstance(todo, Post)
    return todo


def hear(one: Answer, *events: Mapping[str, Any], now: float = 0.0) -> list[Piece]:
    pieces = [one.line(said(**event), now) for event in events]
    return [piece for piece in pieces if piece is not None]


def test_the_first_entry_is_asked_for_signs_of_life_if_there_is_another() -> None:
    post = posted(answer(2)[0])
    assert (post.url, post.body) == ("http://e0/chain", {"prompt": "x", "stream": True})
    assert (post.headers, post.read_s) == ({"X-Mesh-Beat": "1"}, SILENCE_S)
    alone = posted(answer(1)[0])
    assert (alone.headers, alone.read_s) == ({}, Patience().timeout_s)


def test_entries_that_all_seem_silent_are_waited_for_longer_until_a_token_comes() -> None:
    """Under a load that slows every device down, leaving each in turn would never end in an answer."""
    one, _ = answer(2)
    waits = []
    for event in ({}, {}, {}, {"tokens": [1]}, {}):
        post = next(todo for _ in range(2) if isinstance(todo := one.next(0.0), Post))
        waits.append(post.read_s)
        if event:
            hear(one, START, event)
        one.lost("timed out", 0.0)
    assert waits == [SILENCE_S * factor for factor in (1.0, 1.5, 2.0, 2.5, 1.5)]


def test_the_next_entry_goes_on_where_the_last_one_stopped() -> None:
    one, entries = answer(2)
    posted(one)
    pieces = hear(one, START, {"tokens": [1, 2], "text": "ab"}, {"tokens": [3], "text": "c"})
    one.lost("timed out", 1.0)
    post = posted(one, 1.0)
    assert post.url == "http://e1/chain"
    assert {key: post.body[key] for key in ("seed", "digest", "resume")} == {
        "seed": 7,
        "digest": "d1",
        "resume": {"tokens": [1, 2, 3]},
    }
    pieces += hear(one, {**START, "id": "s2"}, {"tokens": [4], "text": "d"}, END)
    assert [piece.tokens for piece in pieces] == [(1, 2), (3,), (4,), ()]
    assert [piece.session for piece in pieces] == ["s1", "s1", "s2", "s2"]
    assert pieces[-1].final == {**END, "tokens": [1, 2, 3, 4], "text": "abcd"}
    assert one.next(2.0) is None
    assert entries.first == 1, "the one that answered is asked first next time"


def test_what_is_sent_does_not_change_afterwards() -> None:
    one, _ = answer(2)
    posted(one)
    hear(one, START, {"tokens": [1]})
    one.lost("reset", 0.0)
    post = posted(one)
    hear(one, {"tokens": [2]})
    assert post.body["resume"] == {"tokens": [1]}


def test_comments_and_the_end_mark_are_nothing() -> None:
    one, _ = answer(2)
    posted(one)
    assert [one.line(line, 0.0) for line in ("", ": still here", "data: [DONE]", "event: x")] == [None] * 4
    assert one.listening


def test_where_one_has_gone_the_others_are_asked_who_is_there() -> None:
    one, _ = answer(4)
    posted(one)
    one.lost("timed out", 0.0)
    assert one.next(0.0) == Race(("http://e1", "http://e2", "http://e3"), 1.0)
    one.awake("http://e3")
    assert posted(one).url == "http://e3/chain"
    one.lost("reset", 0.0)
    assert one.next(0.0) == Race(("http://e1", "http://e2"), 1.0), "neither of those that have failed"
    one.awake(None)
    assert posted(one).url == "http://e1/chain"


def test_an_entry_that_refuses_says_nothing_of_the_others() -> None:
    one, _ = answer(3)
    posted(one)
    one.refused(503, GONE, 0.0)
    assert posted(one).url == "http://e1/chain"


def test_an_error_in_the_stream_is_tried_elsewhere_too() -> None:
    one, _ = answer(2)
    posted(one)
    hear(one, START, {"tokens": [1]}, {"error": {"status": 503, "code": "stage_unavailable", "message": "gone"}})
    assert not one.listening
    assert posted(one).body["resume"] == {"tokens": [1]}


@pytest.mark.parametrize("status", [400, 401, 404, 409])
def test_the_callers_fault_is_said_at_once(status: int) -> None:
    one, _ = answer(3)
    posted(one)
    one.refused(status, GONE, 0.0)
    with pytest.raises(RequestFailed) as caught:
        one.next(0.0)
    assert caught.value.http_status == status


def test_an_old_word_about_the_room_is_asked_for_again_before_it_is_told() -> None:
    """One said that layers were gone, the next two took seconds to be given up: meanwhile the layers may be back."""
    one, _ = answer(3, patience_s=0.0)
    posted(one)
    one.refused(503, GONE, 0.0)
    posted(one)
    one.lost("timed out", 1.5)
    assert posted(one, 1.5).url == "http://e2/chain"
    one.lost("timed out", 3.5)
    assert posted(one, 3.5).url == "http://e0/chain"
    one.refused(503, GONE, 3.6)
    with pytest.raises(RequestFailed, match=re.escape("15..30")):
        one.next(3.6)


def test_who_is_asked_again_and_is_gone_is_not_asked_for_ever() -> None:
    one, _ = answer(2, patience_s=0.0)
    posted(one)
    one.refused(503, GONE, 0.0)
    posted(one)
    one.lost("timed out", 1.5)
    posted(one, 1.5)
    one.lost("timed out", 3.0)
    with pytest.raises(NoEntry):
        one.next(3.0)


def test_patience_is_from_the_last_token_and_each_is_asked_before_the_end() -> None:
    one, _ = answer(2, patience_s=10.0)
    posted(one)
    one.refused(503, GONE, 11.0)
    assert posted(one, 11.0).url == "http://e1/chain", "late, but not asked yet"
    hear(one, START, {"tokens": [1]}, now=11.0)
    one.refused(503, GONE, 12.0)
    assert posted(one, 12.0).url == "http://e0/chain"
    one.refused(503, GONE, 21.9)
    assert one.next(21.9) == Pause(PAUSE_S), "all have been asked, and there is time left since the last token"
    assert posted(one, 22.0).url == "http://e1/chain"
    one.refused(503, GONE, 22.1)
    assert posted(one, 22.1).url == "http://e0/chain"
    one.refused(503, GONE, 22.2)
    with pytest.raises(RequestFailed, match="unavailable"):
        one.next(22.2)


def test_entries_that_are_full_are_asked_less_and_less_often() -> None:
    full = json.dumps({"error": {"code": "busy", "message": "64 requests run at this node"}}).encode()
    one, _ = answer(2)
    pauses = []
    for status, body in [(429, full)] * 13 + [(0, b"")] + [(503, GONE)] * 2:
        while not isinstance(todo := one.next(0.0), Post):
            assert isinstance(todo, Pause)
            pauses.append(todo.seconds)
        if status:
            one.refused(status, body, 0.0)
        else:
            one.lost("refused", 0.0)
    assert one.next(0.0) == Pause(PAUSE_S), "layers may be back at any moment"
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert pauses[-1] == FULL_S


def test_what_an_entry_said_is_worth_more_than_that_another_was_not_there() -> None:
    one, _ = answer(2, patience_s=0.0)
    posted(one)
    one.refused(503, GONE, 0.5)
    posted(one, 0.5)
    one.lost("refused", 1.0)
    with pytest.raises(RequestFailed) as caught:
        one.next(1.0)
    assert caught.value.waited_s == pytest.approx(0.5)


def test_what_is_said_of_the_room_is_worth_more_than_of_an_entry_that_starts() -> None:
    starting = json.dumps({"error": {"code": "not_ready", "message": "the chain is not running yet"}}).encode()
    one, _ = answer(2, patience_s=0.0)
    posted(one)
    one.refused(503, GONE, 0.5)
    posted(one, 0.5)
    one.refused(503, starting, 1.0)
    with pytest.raises(RequestFailed, match=r"stage 15\.\.30 unavailable"):
        one.next(1.0)


def test_a_single_entry_is_asked_again_only_after_progress() -> None:
    one, _ = answer(1)
    posted(one)
    hear(one, START, {"tokens": [1]})
    one.lost("reset", 1.0)
    assert one.next(1.0) == Pause(PAUSE_S)
    assert posted(one, 1.1).body["resume"] == {"tokens": [1]}
    one.lost("reset", 1.2)
    with pytest.raises(NoEntry, match="http://e0: reset"):
        one.next(1.2)


def test_one_deadline_is_for_all_entries_together() -> None:
    one, _ = answer(2, deadline_ms=5000)
    assert posted(one, 0.0).body["deadline_ms"] == 5000
    hear(one, START, {"tokens": [1]})
    one.lost("timed out", 2.0)
    assert posted(one, 2.0).body["deadline_ms"] == 3000
    hear(one, {"tokens": [2]})
    one.lost("timed out", 5.0)
    with pytest.raises(NoEntry):
        one.next(5.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_silence_is_waited_for_past_the_deadline(count: int) -> None:
    """Every entry takes connections and says nothing."""
    one, _ = answer(count, deadline_ms=700)
    now = 0.0

    def wait_for_all() -> None:
        nonlocal now
        while (todo := one.next(now)) is not None:
            if isinstance(todo, Post):
                now += todo.read_s
                one.lost("timed out", now)
            elif isinstance(todo, Race):
                now += todo.within_s
                one.awake(None)

    with pytest.raises(NoEntry, match="700 ms"):
        wait_for_all()
    assert now <= 0.7 + 2 * LATE_S


def test_whoever_ignores_what_it_is_resumed_with_does_not_go_on_for_ever() -> None:
    one, _ = answer(1, max_tokens=3)
    heard: list[Piece] = []

    def go_on() -> None:
        for _ in range(8):
            if isinstance(one.next(1.0), Post):
                heard.extend(hear(one, START, {"tokens": [1, 2], "text": "ab"}, now=1.0))
                if one.listening:
                    one.lost("reset", 1.0)

    with pytest.raises(NoEntry, match="more than the 3 tokens asked for"):
        go_on()
    assert [piece.text for piece in heard] == ["ab"]


@pytest.mark.parametrize("line", ["data: {", "data: <html>"])
def test_whoever_does_not_speak_json_is_left(line: str) -> None:
    one, _ = answer(2)
    posted(one)
    assert one.line(line, 0.0) is None
    assert not one.listening
    assert posted(one).url == "http://e1/chain"


def test_streams_of_one_client_do_not_mistake_each_others_entries() -> None:
    """Both begin at the first; one finds it dead and leaves, and that must not make the other's loss the second entry's."""
    one, entries = answer(2)
    other = Answer(entries, {"prompt": "y"}, Patience(), 0.0)
    posted(one)
    posted(other)
    one.lost("timed out", 1.0)
    posted(one, 1.0)
    hear(one, START)
    other.lost("timed out", 1.5)
    assert posted(other, 1.5).url == "http://e1/chain"


def test_no_entry_is_an_error_of_its_own() -> None:
    with pytest.raises(NoEntry):
        Entries([])
