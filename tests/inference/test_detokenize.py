"""Incremental text: no premature U+FFFD, no lost or doubled text, stop strings across token borders (case A44's pure half)."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.inference.detokenize import Detokenizer, StopStrings

CRAB = list("🦀".encode())


def one_shot(ids: list[int]) -> str:
    """A byte-level tokenizer of single bytes: ids are bytes."""
    return bytes(ids).decode("utf-8", "replace")


def stripping(ids: list[int]) -> str:
    """A decoder that drops the text's leading space, as sentence-piece decoders do."""
    return one_shot(ids).removeprefix(" ")


Decode = Callable[[list[int]], str]


def shown(ids: list[int], cuts: list[int], *, stops: tuple[str, ...] = (), decode: Decode = one_shot) -> list[str]:
    d = Detokenizer(stops)
    deltas = []
    at = 0
    for cut in [*cuts, len(ids)]:
        deltas.append(d.feed([decode(window) for window in d.add(ids[at:cut])]))
        at = cut
    return [*deltas, d.finish()]


def each(ids: list[int]) -> list[int]:
    return list(range(1, len(ids)))


def test_emoji_of_several_tokens_arrives_whole() -> None:
    assert shown(CRAB, each(CRAB)) == ["", "", "", "🦀", ""]


def test_emoji_cut_by_max_tokens_flushes_what_one_shot_gives() -> None:
    assert shown(CRAB[:2], [1]) == ["", "", "\ufffd"]


def test_invalid_byte_is_shown_once_it_cannot_complete() -> None:
    ids = [0x41, 0x80, 0x42]
    assert shown(ids, each(ids)) == ["A", "", "\ufffdB", ""]


def test_invalid_bytes_for_ever_stay_bounded() -> None:
    ids = [0x80] * 500
    d = Detokenizer()
    longest = 0
    text = ""
    for i in ids:
        windows = d.add([i])
        longest = max(longest, *map(len, windows))
        text += d.feed([one_shot(window) for window in windows])
    assert text + d.finish() == "\ufffd" * 500
    assert longest <= 100


def test_windows_stay_small_in_a_long_answer() -> None:
    d = Detokenizer()
    longest = 0
    for i in range(2000):
        windows = d.add([65 + i % 26])
        longest = max(longest, *map(len, windows))
        assert d.feed([one_shot(window) for window in windows]) == chr(65 + i % 26)
    assert longest <= 30


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.lists(st.integers(0, 240), max_size=40), st.sampled_from([one_shot, stripping]))
def test_deltas_join_to_the_one_shot_text(text: str, cuts: list[int], decode: Decode) -> None:
    ids = list(text.encode("utf-8", "replace"))
    deltas = shown(ids, sorted(c for c in cuts if c <= len(ids)), decode=decode)
    assert "".join(deltas) == decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.lists(st.integers(0, 80), max_size=40))
def test_any_bytes_join_to_the_one_shot_text(raw: bytes, cuts: list[int]) -> None:
    ids = list(raw)
    assert "".join(shown(ids, sorted(c for c in cuts if c <= len(ids)))) == one_shot(ids)


def cut_before(text: str, stops: list[str]) -> str:
    """The reader who sees one character at a time."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


@settings(max_examples=400, deadline=None)
@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 40), max_size=40),
)
def test_stop_strings_do_not_depend_on_the_division(text: str, stops: list[str], cuts: list[int]) -> None:
    assert "".join(
        shown(list(text.encode()), sorted(c for c in cuts if c <= len(text)), stops=tuple(stops))
    ) == cut_before(text, stops)


def test_text_that_could_begin_a_stop_string_waits() -> None:
    stop = StopStrings(["###"])
    assert stop.push("a#") == "a"
    assert stop.push("#b") == "##b"
    assert stop.push("##") == ""
    assert stop.finish() == "##"
    assert stop.push("###tail") == ""
    assert stop.hit == "###"
    assert stop.push("more") == ""


def test_stopped_says_which() -> None:
    d = Detokenizer(["lo"])
    assert d.feed([one_shot(w) for w in d.add(list(b"hello"))]) == "hel"
    assert d.stopped
    assert d.stop == "lo"
    assert d.finish() == ""
