"""In bf16 a row's bits depend on its session's tokens alone: not on chunks, company, threads or being a replay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshd.inference.worker import arithmetic, attention, linears
from meshd.inference.worker.kv import PackedState
from meshd.inference.worker.stage import Stage
from meshd.vocabulary import LayerRange
from tests.inference.stage.chain import Chain, Session, Share, some_ids, whole
from tests.inference.stage.checkpoints import VOCABULARY, reference
from tests.inference.stage.conftest import Made

pytestmark = pytest.mark.torch

# plain, windows, soft caps with windows, experts, experts with sinks and windows
NAMES = ["llama", "mistral_window", "gemma2", "qwen3_moe", "gpt_oss", "phi3"]
PROMPTS = (70, 33, 5)
ANSWER = 5


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize(("name", "workers"), [*((name, 1) for name in NAMES), ("llama", 2)])
def test_alone_chunked_batched_and_replayed_are_bitwise_equal(tiny: Made, name: str, workers: int) -> None:
    folder, _ = tiny(name, torch.bfloat16)
    chain = Chain.cut(folder, [0, 2, 4], threads=workers)
    assert all(stage.deterministic for stage in chain.stages), chain.stages[0].warnings
    texts = [some_ids(n + ANSWER, VOCABULARY, seed) for seed, n in enumerate(PROMPTS)]

    alone = [chain.session(n) for n in PROMPTS]
    expected = [chain.walk(s, ids, [s.prompt_len] + [1] * ANSWER) for s, ids in zip(alone, texts, strict=True)]

    mixed = [chain.session(n) for n in PROMPTS]
    got = _together(chain, mixed, texts, random.Random(5))
    replayed = [chain.session(n) for n in PROMPTS]
    again = [chain.walk(s, ids, [len(ids)]) for s, ids in zip(replayed, texts, strict=True)]

    torch.set_num_threads(1)
    for i in range(len(PROMPTS)):
        assert torch.equal(got[i], expected[i])
        assert torch.equal(again[i], expected[i])
        _assert_same_state(alone[i], mixed[i])
        _assert_same_state(alone[i], replayed[i])


def _together(
    chain: Chain, sessions: list[Session], texts: list[torch.Tensor], rng: random.Random
) -> list[torch.Tensor]:
    """All sessions at once, in random chunks; decode rows, drafts and prompts mixed."""
    parts: list[list[torch.Tensor]] = [[] for _ in sessions]
    done = [0] * len(sessions)
    while any(at < len(ids) for at, ids in zip(done, texts, strict=True)):
        open_ones = [i for i, ids in enumerate(texts) if done[i] < len(ids)]
        chosen = rng.sample(open_ones, rng.randint(1, len(open_ones)))
        sizes = {i: min(rng.choice([1, 3, 17, 40]), len(texts[i]) - done[i]) for i in chosen}
        shares = [Share(sessions[i], done[i], texts[i][done[i] : done[i] + sizes[i]]) for i in chosen]
        for i, rows in zip(chosen, chain.step(*shares), strict=True):
            parts[i].append(rows)
            done[i] += sizes[i]
    return [torch.cat(rows) for rows in parts]


def _assert_same_state(one: Session, two: Session) -> None:
    for a, b in zip(one.states, two.states, strict=True):
        assert isinstance(a, PackedState)
        assert isinstance(b, PackedState)
        assert a.have == b.have
        for x, y in zip(a.buffers, b.buffers, strict=True):
            assert x is not None
            assert y is not None
            assert torch.equal(x[:, :, : a.have], y[:, :, : a.have])
        if a.logs:
            assert torch.equal(a.boundary(0, a.have), b.boundary(0, b.have))


def test_a_rejected_draft_leaves_no_trace(tiny: Made) -> None:
    folder, _ = tiny("llama", torch.bfloat16)
    chain = Chain.cut(folder, [0, 2, 4])
    ids = some_ids(30, VOCABULARY)
    clean, drafted = chain.session(20), chain.session(20)
    expected = chain.walk(clean, ids, [20, 1, 1, 1])
    chain.walk(drafted, ids, [20])
    chain.step(Share(drafted, 20, torch.cat([ids[20:21], some_ids(6, VOCABULARY, 9)])))
    got = chain.walk(drafted, ids, [1, 1], start=21)
    assert torch.equal(got, expected[21:23])


def test_the_trial_notices_attention_that_depends_on_company(tiny: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny("llama", torch.bfloat16)
    original = attention._rows

    def sociable(call: attention.RowCall, part: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = original(call, part, *rest)
        return result + 0.01 if len(part) > 1 else result

    monkeypatch.setattr(attention, "_rows", sociable)
    stage = Stage(folder, LayerRange(0, 2))
    assert not stage.deterministic
    assert any("deterministic arithmetic is off" in warning for warning in stage.warnings)


def test_norms_with_a_row_of_weights_for_each_head_are_no_routers(tmp_path: Path) -> None:
    model = reference("cohere", tmp_path, torch.bfloat16, use_qk_norm=True)
    stage = Stage(tmp_path, LayerRange(0, 4))
    assert stage.deterministic, stage.warnings
    ids = some_ids(60, VOCABULARY)
    chain = Chain([stage])
    torch.testing.assert_close(chain.walk(chain.session(60), ids, [60]), whole(model, ids), atol=0.05, rtol=0)


@pytest.mark.parametrize("inputs", [4, 20, 48])
def test_int8_weights_of_any_width(inputs: int) -> None:
    """torch's kernel ends the process where the width is no multiple of 16."""
    plain = torch.nn.Linear(inputs, 24, dtype=torch.bfloat16)
    x = torch.randn(5, inputs).to(torch.bfloat16)
    with torch.inference_mode():
        small = linears.quantise(plain)
        assert small is not None
        torch.testing.assert_close(small(x), plain(x), atol=0.05, rtol=0.05)
        with linears.of_prompts():
            for rows in (x, x[:1]):
                torch.testing.assert_close(small(rows), plain(rows), atol=0.05, rtol=0.05)


class Unsteady(linears.Int8Linear):
    """Sums in another order from 33 rows on."""

    def product(self, flat: torch.Tensor) -> torch.Tensor:
        out = super().product(flat)
        return out * 1.01 if len(flat) > 32 else out


def test_linears_that_change_with_the_batch_run_in_blocks() -> None:
    model = torch.nn.Sequential(Unsteady(torch.nn.Linear(64, 48, dtype=torch.bfloat16)))
    x = torch.randn(97, 64).to(torch.bfloat16)
    with torch.inference_mode():
        assert "Unsteady 48x64: 32" in arithmetic.steady(model)
        got = model(x)
        assert got.shape == (97, 48)
        for row in (0, 40, 96):
            assert torch.equal(got[row], model(x[[row, 0]])[0])


@pytest.mark.parametrize("kind", ["plain", "prepacked", "int8", "widened"])
def test_every_batch_up_to_the_block_keeps_every_bit(kind: str, threads: int) -> None:
    """Sums that cancel show any change of order; the start-up check tries a few sizes, this tries all."""
    torch.set_num_threads(threads)
    into, out = 1536, 96
    source = torch.Generator().manual_seed(3)
    half = torch.randn(out, into // 2, generator=source)
    linear = torch.nn.Linear(into, out, bias=False, dtype=torch.bfloat16)
    linear.weight = torch.nn.Parameter(torch.cat([half, half], 1).to(torch.bfloat16), requires_grad=False)
    rows = torch.randn(128, into // 2, generator=source)
    x = torch.cat([rows, -rows], 1).to(torch.bfloat16)
    with torch.inference_mode():
        if kind == "prepacked":
            packed = linears.prepack(linear)
            if packed is None:
                pytest.skip("this machine's torch does not prepack")
            run: Any = packed
        else:
            small = linears.Int8Linear(linear)
            run = {"plain": linear, "int8": small, "widened": small.widened}[kind]
            if run is None:
                pytest.skip("this machine multiplies int8 weights only as they are")
        pairs = torch.cat([run(pair) for pair in x.split(2)])
        for n in range(2, arithmetic.steady_rows(run) + 1):
            assert torch.equal(run(x[:n]), pairs[:n]), n


@pytest.mark.parametrize(("heads", "groups", "width"), [(9, 3, 64), (8, 1, 80), (4, 4, 16)])
def test_attention_keeps_every_bit_in_any_company(heads: int, groups: int, width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        assert arithmetic.attention_steady(heads, groups, width)


@pytest.mark.parametrize(("heads", "groups", "width"), [(9, 3, 64), (32, 8, 128), (14, 2, 64), (4, 4, 16)])
def test_heads_that_stand_together_see_what_they_see_apart(heads: int, groups: int, width: int) -> None:
    source = torch.Generator().manual_seed(7)
    state = PackedState(LayerRange(0, 1), logs=False)
    for length in (64, 600, 1300):
        keys, values = torch.randn(2, groups, length, width, generator=source).to(torch.bfloat16)
        state.put(0, 0, keys, values)
        start = (length - 1) // attention.BLOCK * attention.BLOCK
        query = torch.randn(length - start, heads, width, generator=source).to(torch.bfloat16)
        got = attention.attend(state, start, query, prompt_len=length, scale=width**-0.5)
        held = state.layer(0)[:, :, : -(-length // 64) * 64]
        whole = torch.zeros(attention.BLOCK, heads, width, dtype=torch.bfloat16)
        whole[: len(query)] = query
        unseen = torch.arange(held.shape[2]) > torch.arange(start, start + attention.BLOCK)[:, None]
        mask = torch.zeros(unseen.shape, dtype=torch.bfloat16).masked_fill(unseen, -torch.inf)
        apart = torch.nn.functional.scaled_dot_product_attention(
            whole.transpose(0, 1)[None],
            held[None, 0],
            held[None, 1],
            attn_mask=mask,
            scale=width**-0.5,
            enable_gqa=True,
        )
        assert torch.equal(got, apart[0].transpose(0, 1)[: len(query)])


def test_arith_names_the_arithmetic_and_not_the_layers(tiny: Made) -> None:
    folder, _ = tiny("llama", torch.bfloat16)
    first, last = (Stage(folder, layers) for layers in (LayerRange(0, 1), LayerRange(1, 4)))
    plain = Stage(folder, LayerRange(0, 1), prepack="off")
    assert first.arith == last.arith != plain.arith
    assert Stage(folder, LayerRange(0, 1), dtype="fp32").arith not in (first.arith, plain.arith)


def test_fp32_says_that_it_is_not_deterministic(tiny: Made) -> None:
    folder, _ = tiny("llama")
    stage = Stage(folder, LayerRange(0, 4))
    assert stage.dtype == "fp32"
    assert not stage.deterministic
    assert any("deterministic arithmetic is off" in warning for warning in stage.warnings)
