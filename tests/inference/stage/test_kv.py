"""A session's state: what is written is there, what is cut is gone, and the bytes are as announced."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.errors import NeedRows, RangeNotHeld
from meshd.inference.worker.kv import GRAIN_TOKENS, PackedState, capacity_for
from meshd.inference.worker.stage import Item, Stage
from meshd.vocabulary import LayerRange
from tests.inference.stage.chain import some_ids
from tests.inference.stage.checkpoints import VOCABULARY
from tests.inference.stage.conftest import Made

pytestmark = pytest.mark.torch

ONE = LayerRange(2, 3)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 200)), max_size=8))
@settings(max_examples=40, deadline=None)
def test_rows_written_at_any_place_are_read_back(writes: list[tuple[float, int]]) -> None:
    """Each write starts somewhere in what is there, as a step does, and cuts what was behind."""
    state = PackedState(ONE, logs=True)
    expected = torch.zeros(0, 2)
    for number, (place, n) in enumerate(writes, 1):
        start = int(place * state.have)
        rows = torch.arange(n * 2, dtype=torch.float32).view(n, 2) + 1000 * number
        state.truncate(start)
        state.put(0, start, rows[None], -rows[None])
        state.log(start, rows)
        state.have = start + n
        expected = torch.cat([expected[:start], rows])
        held = state.layer(0)
        assert held.shape[2] % GRAIN_TOKENS == 0
        assert torch.equal(held[0, 0, : state.have], expected)
        assert torch.equal(held[1, 0, : state.have], -expected)
        assert torch.equal(state.boundary(0, state.have), expected)
    with pytest.raises(NeedRows):
        state.boundary(0, state.have + 1)


def test_a_cut_takes_the_boundary_log_with_it() -> None:
    state = PackedState(ONE, logs=True)
    state.log(0, torch.ones(5, 2))
    state.have = 5
    state.truncate(3)
    assert len(state.boundary(1, 3)) == 2
    with pytest.raises(NeedRows) as caught:
        state.boundary(0, 4)
    assert caught.value.have == 3


@pytest.mark.parametrize("tokens", [1, 64, 65, 256, 257, 1000])
def test_capacity_holds_what_it_is_for(tokens: int) -> None:
    assert tokens <= capacity_for(tokens) < tokens + 256
    assert capacity_for(tokens) % GRAIN_TOKENS == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bytes_are_as_announced(tiny: Made, name: str) -> None:
    stage = Stage(tiny(name)[0], LayerRange(0, 4))
    for layers in (LayerRange(0, 3), LayerRange(1, 2), LayerRange(0, 4)):
        state = stage.state(layers)
        state.reserve(90)
        rows = some_ids(70, VOCABULARY) if layers.start == 0 else torch.randn(70, 64)
        stage.step(layers, [Item(state, 0, 70, 0, 70, rows)])
        assert state.nbytes == state.bytes_for(70) == state.bytes_for(90)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_steps_that_cannot_be_are_refused_before_anything_is_computed(tiny: Made, name: str) -> None:
    stage = Stage(tiny(name)[0], LayerRange(0, 2))
    ready, short = stage.state(), stage.state()
    ids = some_ids(8, VOCABULARY)
    stage.step(stage.layers, [Item(ready, 0, 5, 0, 5, ids[:5])])
    with pytest.raises(NeedRows) as caught:
        stage.step(stage.layers, [Item(ready, 5, 1, 1, 5, ids[5:6]), Item(short, 3, 1, 1, 5, ids[3:4])])
    assert caught.value.have == 0
    assert ready.have == 5
    with pytest.raises(RangeNotHeld):
        stage.step(LayerRange(1, 3), [])
    with pytest.raises(RangeNotHeld):
        stage.lm_head(torch.zeros(1, 64))
    later = Stage(tiny(name)[0], LayerRange(2, 4))
    with pytest.raises(RangeNotHeld):
        later.embed(ids)


def test_a_step_without_rows_only_cuts(tiny: Made) -> None:
    stage = Stage(tiny("llama")[0], LayerRange(0, 2))
    state, ids = stage.state(), some_ids(8, VOCABULARY)
    stage.step(stage.layers, [Item(state, 0, 8, 0, 8, ids)])
    (out,) = stage.step(stage.layers, [Item(state, 6, 0, 0, 8, ids[:0])])
    assert out.shape == (0, stage.hidden_size)
    assert state.have == 6


def test_rows_that_are_not_emitted_are_logged(tiny: Made) -> None:
    stage = Stage(tiny("llama")[0], LayerRange(0, 2))
    emitted, silent, ids = stage.state(), stage.state(), some_ids(8, VOCABULARY)
    (rows,) = stage.step(stage.layers, [Item(emitted, 0, 8, 8, 8, ids)])
    (none,) = stage.step(stage.layers, [Item(silent, 0, 8, 0, 8, ids)])
    assert len(none) == 0
    torch.testing.assert_close(silent.boundary(0, 8), rows)
