"""Cut, cached, packed and rewound equals whole, for every architecture on the list and for those that cannot be packed."""

from __future__ import annotations

import pytest
import torch

from meshd.errors import ModelRefused
from meshd.inference.worker.stage import Item, Stage
from meshd.vocabulary import LayerRange
from tests.inference.stage.chain import Chain, Share, some_ids, whole
from tests.inference.stage.checkpoints import PACKED, SINGLE, VOCABULARY
from tests.inference.stage.conftest import Made

pytestmark = pytest.mark.torch

PROMPT, TOTAL = 40, 46
CLOSE = 1e-5


@pytest.mark.parametrize("name", [*PACKED, *SINGLE])
def test_cut_in_three_with_cache_equals_whole(tiny: Made, name: str) -> None:
    folder, model = tiny(name)
    chain = Chain.cut(folder, [0, 1, 3, 4])
    assert all(stage.packs == (name in PACKED) for stage in chain.stages)
    ids = some_ids(TOTAL, VOCABULARY)
    expected = whole(model, ids)

    got = chain.walk(chain.session(PROMPT), ids, [24, 16, 1, 1, 4])

    torch.testing.assert_close(got, expected, atol=CLOSE, rtol=0)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", [*PACKED, *SINGLE])
def test_company_and_rewinding_change_nothing(tiny: Made, name: str) -> None:
    folder, model = tiny(name)
    chain = Chain.cut(folder, [0, 2, 4])
    long, short = some_ids(TOTAL, VOCABULARY, 2), some_ids(19, VOCABULARY, 3)
    expected_long, expected_short = whole(model, long), whole(model, short)
    one, two = chain.session(PROMPT), chain.session(12)

    chain.step(Share(one, 0, long[:30]), Share(two, 0, short[:12]))  # two prefills
    chain.step(Share(two, 12, some_ids(5, VOCABULARY, 4)), Share(one, 30, long[30:PROMPT]))  # drafts beside a chunk
    if chain.stages[0].packs:
        back = 12
    else:  # a state that cannot be cut is forgotten whole, and says so
        for state in two.states:
            state.truncate(12)
        back = min(state.have for state in two.states)
    tail, row = chain.step(Share(two, back, short[back:]), Share(one, PROMPT, long[PROMPT : PROMPT + 1]))

    torch.testing.assert_close(tail, expected_short[back:], atol=CLOSE, rtol=0)
    torch.testing.assert_close(row, expected_long[PROMPT : PROMPT + 1], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "granite", "gpt2", "smollm3", "bloom", "gpt_neo", "lfm2"])
def test_a_part_of_what_is_held_can_be_run(tiny: Made, name: str) -> None:
    """A session may use 1..3 of a stage that holds 0..4, beside sessions that use all of it."""
    folder, model = tiny(name)
    stage = Stage(folder, LayerRange(0, 4))
    ids = some_ids(TOTAL, VOCABULARY, 5)
    in_parts = Chain([stage] * 3, [LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)])
    in_one = Chain([stage])
    parted, entire = in_parts.session(PROMPT), in_one.session(PROMPT)

    first = in_parts.walk(parted, ids, [PROMPT])
    between = in_one.walk(entire, ids, [PROMPT, 6])
    last = in_parts.walk(parted, ids, [5, 1], start=PROMPT)

    expected = whole(model, ids)
    torch.testing.assert_close(torch.cat([first, last]), expected, atol=CLOSE, rtol=0)
    torch.testing.assert_close(between, expected, atol=CLOSE, rtol=0)


def test_weights_that_are_used_without_their_linear_stay(tiny: Made) -> None:
    folder, model = tiny("mamba", torch.bfloat16)
    chain = Chain.cut(folder, [0, 2, 4])
    assert all("prepacked weights" in stage.warnings[-2] for stage in chain.stages)
    ids = some_ids(20, VOCABULARY)
    got = chain.walk(chain.session(20), ids, [20])
    assert (got - whole(model, ids)).norm() / whole(model, ids).norm() < 0.02
    with pytest.raises(ModelRefused, match="use bf16"):
        Chain.cut(folder, [0, 4], dtype="int8")
    prepacked, _ = tiny("bloom", torch.bfloat16)
    assert Chain.cut(prepacked, [0, 4]).stages[0].private_bytes > 0


@pytest.mark.parametrize("name", ["bloom", "lfm2", "mamba"])
def test_a_step_that_broke_off_leaves_nothing_behind(tiny: Made, name: str) -> None:
    """The layers before the fault have the rows already; the same step again must not add them twice."""
    folder, model = tiny(name)
    chain = Chain.cut(folder, [0, 4])
    ids = some_ids(TOTAL, VOCABULARY)
    session = chain.session(PROMPT)

    def fail(*_args: object) -> None:
        raise RuntimeError("no memory")

    handle = chain.stages[0]._skeleton.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        chain.walk(session, ids, [PROMPT])
    handle.remove()

    got = chain.walk(session, ids, [PROMPT, 1, 5])
    torch.testing.assert_close(got, whole(model, ids), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", ["gemma", "lfm2", "mamba"])
def test_a_prompts_later_chunks_may_be_asked_for_less_than_all_rows(tiny: Made, name: str) -> None:
    """As a prompt in chunks is: nothing of the first ones, and the last row of the last."""
    folder, model = tiny(name)
    stage = Stage(folder, LayerRange(0, 4))
    ids = some_ids(PROMPT, VOCABULARY)
    state = stage.state()
    for start, end, emit in ((0, 8, 0), (8, 16, 0), (16, PROMPT, 2)):
        (rows,) = stage.step(stage.layers, [Item(state, start, end - start, emit, PROMPT, ids[start:end])])
        assert len(rows) == emit
    torch.testing.assert_close(rows, whole(model, ids)[-2:], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", ["gemma", "granite", "gpt2", "opt_projected", "cohere2", "deepseek_v3"])
def test_without_a_session_forward_and_head_equal_whole(tiny: Made, name: str) -> None:
    folder, model = tiny(name)
    chain = Chain.cut(folder, [0, 2, 4])
    first, last = chain.stages
    ids = some_ids(21, VOCABULARY, 6)

    from_ids = last.lm_head(last.forward(last.layers, first.forward(first.layers, ids)))
    embedded = first.embed(ids)
    from_embedding = last.lm_head(last.forward(last.layers, first.forward(first.layers, embedded)))

    expected = whole(model, ids)
    torch.testing.assert_close(from_ids, expected, atol=CLOSE, rtol=0)
    torch.testing.assert_close(from_embedding, expected, atol=CLOSE, rtol=0)
