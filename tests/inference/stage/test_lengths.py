"""Rotary frequencies that depend on how long a text is: each row has those that it has when transformers generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshd.errors import NeedRows
from meshd.inference.worker.item import Item
from tests.inference.stage.chain import Chain, Session, some_ids, whole
from tests.inference.stage.checkpoints import VOCABULARY, reference

pytestmark = pytest.mark.torch

PROMPT, ANSWER, CHUNK = 40, 12, 17


def _two_ranges(folder: Path, kind: str, limit: int) -> Any:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": limit,
    }
    own = {"original_max_position_embeddings": limit} if kind == "phi3" else {}
    return reference(kind, folder, noise=0.15, rope_parameters=rope, **own)


def _generated(model: Any, ids: torch.Tensor) -> list[int]:
    model.generation_config.eos_token_id = None
    whole_text = model.generate(ids[None], max_new_tokens=ANSWER, do_sample=False)[0].tolist()
    return list(whole_text[len(ids) :])


class _Talk:
    """A session whose rows come again where a stage asks for them, as a chain's hops do."""

    def __init__(self, chain: Chain, prompt: torch.Tensor) -> None:
        self.chain, self.ids, self.needs = chain, prompt, 0
        self.session: Session = chain.session(len(prompt))

    def answer(self) -> list[int]:
        n = len(self.ids)
        for start in range(0, n, CHUNK):
            logits = self._step(start, self.ids[start : start + CHUNK])
        while True:
            self.ids = torch.cat([self.ids, logits[-1:].argmax(-1)])
            if len(self.ids) == n + ANSWER:
                return list(self.ids[n:].tolist())
            logits = self._step(len(self.ids) - 1, self.ids[-1:])

    def _step(self, start: int, rows: torch.Tensor) -> torch.Tensor:
        for number, stage in enumerate(self.chain.stages):
            try:
                rows = self._compute(number, start, rows)
            except NeedRows as need:
                self.needs += 1
                before = self.session.states[number - 1].boundary(0, start) if number else self.ids[:start]
                for at in range(need.have, start, CHUNK):
                    self._compute(number, at, before[at : at + min(CHUNK, start - at)])
                rows = self._compute(number, start, rows)
            assert not stage.packs
        return rows

    def _compute(self, number: int, start: int, rows: torch.Tensor) -> torch.Tensor:
        state, prompt_len = self.session.states[number], self.session.prompt_len
        return self.chain.stages[number].step(
            self.chain.ranges[number], [Item(state, start, len(rows), len(rows), prompt_len, rows)]
        )[0]


@pytest.mark.parametrize("limit", [20, 34, PROMPT, 47, 128])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_two_sets_of_frequencies_whatever_the_chunks(tmp_path: Path, kind: str, limit: int) -> None:
    model = _two_ranges(tmp_path, kind, limit)
    prompt = some_ids(PROMPT, VOCABULARY)
    talk = _Talk(Chain.cut(tmp_path, [0, 1, 4]), prompt)

    assert talk.answer() == _generated(model, prompt)
    grows_over = PROMPT <= limit < PROMPT + ANSWER
    assert talk.needs == (2 if kind == "phi3" and grows_over else 0)  # Phi-3 begins anew there: each stage once


def test_without_a_session_a_text_has_the_set_of_its_length(tmp_path: Path) -> None:
    model = _two_ranges(tmp_path, "llama", 20)
    first, last = Chain.cut(tmp_path, [0, 1, 4]).stages
    for n in (15, 30):
        ids = some_ids(n, VOCABULARY)
        logits = last.lm_head(last.forward(last.layers, first.forward(first.layers, ids)))
        torch.testing.assert_close(logits, whole(model, ids), atol=1e-5, rtol=0)


def test_dynamic_frequencies_stay_as_they_are_within_the_models_positions(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = reference("llama", tmp_path, rope_parameters=rope, max_position_embeddings=36)
    chain = Chain.cut(tmp_path, [0, 1, 4])
    assert all(stage.packs for stage in chain.stages)
    ids = some_ids(36, VOCABULARY)
    torch.testing.assert_close(chain.walk(chain.session(30), ids, [17, 13, 6]), whole(model, ids), atol=1e-5, rtol=0)
