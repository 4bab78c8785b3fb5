"""The built-in model as it lies in the store after ``meshd pull smollm2-135m``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshd.config import default_state_dir
from meshd.models.digest import verify_shard
from meshd.models.store import ModelStore, StoredModel

pytestmark = pytest.mark.model

CAPITAL = [504, 3575, 282, 4649, 314]  # "The capital of France is"
PARIS = 7042


@pytest.fixture(scope="module")
def store() -> ModelStore:
    return ModelStore.under(Path(os.environ.get("MESHD_STATE_DIR") or default_state_dir()))


@pytest.fixture(scope="module")
def model(store: ModelStore) -> StoredModel:
    found = store.find("smollm2-135m")
    if found is None:
        pytest.skip("smollm2-135m is not in the store: meshd pull smollm2-135m")
    return found


def test_its_identity_is_the_same_on_every_device(model: StoredModel) -> None:
    """The digest is made of converted bytes: should it change, rooms of two versions would split in two."""
    assert model.spec.digest == "4ac6690251761afc0b6686d19c8dfea9"


def test_its_spec(store: ModelStore, model: StoredModel) -> None:
    spec = model.spec
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.context) == (30, 576, 49152, 8192)
    assert (spec.dtype, spec.tied, spec.eos_ids, spec.bos_id) == ("bf16", True, (2,), 1)
    assert spec.kv_bytes_per_token_layer == 2 * 3 * 64 * 2
    assert spec.weight_bytes(spec.whole) == sum(
        t.size_bytes for t in verify_shard(model.path, spec.whole, store.hashes)
    )


def test_its_tokenizer_gives_the_known_ids(model: StoredModel) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model.path / "tokenizer.json"))
    assert tokenizer.encode("The capital of France is").ids == CAPITAL
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert [tokenizer.decode([token]) for token in tokenizer.encode("x2025").ids] == ["x", "2", "0", "2", "5"]
    for text in (" two  spaces", "naïve 你好 👍\n\ttab", "a\r\n b"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.torch
def test_transformers_understands_it(model: StoredModel) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.path)
    assert tokenizer("The capital of France is").input_ids == CAPITAL
    assert tokenizer.eos_token_id == 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model.path)
    assert loaded.dtype == torch.bfloat16
    with torch.no_grad():
        logits = loaded(torch.tensor([CAPITAL])).logits[0, -1]
    assert int(logits.argmax()) == PARIS
