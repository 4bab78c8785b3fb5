from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshd.api.segments import covered, missing, segments
from meshd.vocabulary import LayerRange

LAYERS = 24
ranges = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS))
    .filter(lambda r: r[0] < r[1])
    .map(lambda r: LayerRange(*r)),
    max_size=8,
)


def test_segments_lie_between_all_ends() -> None:
    held = segments([LayerRange(0, 22), LayerRange(0, 40), LayerRange(22, 40)])
    assert [(each.layers.start, each.layers.end, each.replicas) for each in held] == [(0, 22, 2), (22, 40, 2)]
    assert held[1].holders == (1, 2)


@given(ranges)
def test_every_layer_is_counted_as_often_as_it_is_held(held: list[LayerRange]) -> None:
    counts = {layer: sum(layer in each for each in held) for layer in range(LAYERS)}
    told = {layer: each.replicas for each in segments(held) for layer in range(each.layers.start, each.layers.end)}
    assert told == {layer: count for layer, count in counts.items() if count}


@given(ranges)
def test_segments_are_in_order_cut_at_every_end_and_nowhere_else(held: list[LayerRange]) -> None:
    found = segments(held)
    ends = {end for each in held for end in (each.start, each.end)}
    cuts = {end for each in found for end in (each.layers.start, each.layers.end)}
    assert cuts == ends
    assert all(a.layers.end <= b.layers.start for a, b in pairwise(found))
    for each in found:
        assert not any(each.layers.start < end < each.layers.end for end in ends)


@given(ranges)
def test_covered_and_missing_divide_the_model(held: list[LayerRange]) -> None:
    have = covered(segments(held))
    gaps = missing(have, LAYERS)
    layers = sorted(layer for each in [*have, *gaps] for layer in range(each.start, each.end))
    assert layers == list(range(LAYERS))
    assert all(a.end < b.start for a, b in pairwise(have))


def test_what_is_held_beyond_the_model_leaves_no_gap_behind_it() -> None:
    assert missing([LayerRange(40, 50)], 30) == [LayerRange(0, 30)]
    assert missing([LayerRange(0, 50)], 30) == []
