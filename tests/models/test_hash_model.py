from __future__ import annotations

import pytest

from meshd.errors import UsageError
from meshd.models.hash_model import is_hash_model, parse_hash_model
from meshd.vocabulary import MB, is_model_name


def test_options_cost_but_do_not_change_the_identity() -> None:
    plain, dear = parse_hash_model("hash:8"), parse_hash_model("hash:8,layer_mb=20,step_ms=1.5")
    assert (plain.layer_mb, plain.step_ms) == (100.0, 0.0)
    assert (dear.layer_mb, dear.step_ms) == (20.0, 1.5)
    assert plain.digest == dear.digest
    assert dear.spec.layer_bytes == (20 * MB,) * 8
    assert {parse_hash_model(text).digest for text in ("hash:8", "hash:9", "hash:8,seed=1")} != {plain.digest}
    assert len({parse_hash_model(text).digest for text in ("hash:8", "hash:9", "hash:8,seed=1")}) == 3


def test_the_spec_is_the_contract_of_the_rehearsal_engine() -> None:
    spec = parse_hash_model("hash:30").spec
    assert (spec.name, spec.num_layers, spec.vocab_size, spec.context) == ("hash:30", 30, 256, 8192)
    assert (spec.dtype, spec.hidden_size, spec.eos_ids, spec.bos_id) == ("hash", 16, (), None)
    assert is_model_name(spec.name)
    assert is_hash_model("hash:30")
    assert not is_hash_model("smollm2-135m")


@pytest.mark.parametrize(
    "text",
    ["hash:", "hash:0", "hash:-1", "hash:1e3", "hash:99999", "hash:8,", "hash:8,layers=3", "hash:8,seed=1,seed=2",
     "hash:8,seed=1.5", "hash:8,layer_mb=-1", "hash:8,step_ms=nan", "hash:8;seed=1", "hash:٣"],
)  # fmt: skip
def test_other_spellings_are_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="--model"):
        parse_hash_model(text)
