"""Errors cross the wire as their class, and nothing a peer writes in one can raise anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd import errors
from meshd.links.fault import from_err, to_err
from meshd.links.frame import Err, FrameDecoder, encode
from meshd.vocabulary import LayerRange


def across(error: BaseException) -> errors.MeshdError:
    (frame,) = FrameDecoder().feed_untrusted(b"".join(encode(to_err(1, error))))
    assert isinstance(frame, Err)
    return from_err(frame)


@pytest.mark.parametrize(
    "error",
    [
        errors.NeedRows(12),
        errors.RangeNotHeld("not here", held=LayerRange(3, 9)),
        errors.RangeNotHeld("nothing held"),
        errors.Busy("full", retry_after_s=2.5),
        errors.StageUnavailable([LayerRange(0, 3), LayerRange(5, 6)], pending=True, why="probing"),
        errors.BadTensor("not finite", param="hidden"),
        errors.EngineFailed("out of memory"),
        errors.ModelRefused("x.safetensors: bad"),
        errors.DeadlineExceeded("late"),
    ],
)
def test_known_errors_come_back_whole(error: errors.MeshdError) -> None:
    got = across(error)
    assert type(got) is type(error)
    assert str(got) == str(error)
    assert got.json() == error.json()


@pytest.mark.parametrize("error", [errors.LinkLost("to n3"), errors.WrongPeer("x"), errors.BadFrame("y")])
def test_errors_about_the_peers_own_links_are_not_about_this_one(error: errors.MeshdError) -> None:
    got = across(error)
    assert type(got) is errors.PeerError
    assert got.message == error.message


def test_foreign_exceptions_travel_without_their_text() -> None:
    got = across(KeyError("the prompt"))
    assert type(got) is errors.PeerError
    assert "prompt" not in got.message


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(
    st.sampled_from(["need_rows", "range_not_held", "busy", "stage_unavailable", "bad_tensor", "no_such", ""]),
    st.text(max_size=20),
    st.dictionaries(st.sampled_from(["have", "held", "retry_after_s", "missing", "pending", "param"]), plain),
)
def test_any_detail_gives_some_error(code: str, message: str, detail: dict[str, object]) -> None:
    assert isinstance(from_err(Err(1, code, message, detail)), errors.MeshdError)
