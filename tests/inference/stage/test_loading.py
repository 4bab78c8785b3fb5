"""A stage takes its own tensors and no others, and refuses what is damaged, naming it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshd.errors import ModelRefused
from meshd.inference.worker import packing
from meshd.inference.worker.skeleton import build
from meshd.inference.worker.stage import Stage
from meshd.inference.worker.weights import Checkpoint
from meshd.vocabulary import LayerRange
from tests.inference.stage.chain import Chain, some_ids, whole
from tests.inference.stage.checkpoints import VOCABULARY, reference
from tests.inference.stage.conftest import Made

pytestmark = pytest.mark.torch

ALL = LayerRange(0, 4)


def _index(folder: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return files


@pytest.fixture
def copy(tiny: Made, tmp_path: Path) -> Path:
    """A llama checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny("llama")[0], tmp_path / "model"))


def _edit_header(path: Path, change: Any) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_w26_a_missing_file_is_named_with_its_layer_and_only_where_it_is_needed(copy: Path) -> None:
    files = _index(copy)
    gone = files["model.layers.3.mlp.up_proj.weight"]
    for name, file in files.items():
        if ".layers.0." in name or "embed" in name:
            assert file != gone
    (copy / gone).unlink()

    assert Stage(copy, LayerRange(0, 2)).layers == LayerRange(0, 2)
    with pytest.raises(ModelRefused, match=rf"{gone}.*layer 3") as caught:
        Stage(copy, LayerRange(2, 4))
    assert "layer 3" in caught.value.message


def test_w26_an_index_without_total_size_is_accepted(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": _index(copy)}))
    assert Stage(copy, ALL).packs


def test_w26_a_tensor_that_no_file_holds_is_named(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    files = _index(copy)
    del files["model.layers.2.mlp.down_proj.weight"]
    index.write_text(json.dumps({"weight_map": files}))
    assert Stage(copy, LayerRange(0, 2)).packs
    with pytest.raises(ModelRefused, match=r"layer 2: model\.layers\.2\.mlp\.down_proj\.weight"):
        Stage(copy, LayerRange(1, 4))


def test_w26_a_tensor_of_another_shape_is_refused(copy: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = copy / _index(copy)[name]
    tensors = load_file(path)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, path)
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.up_proj.*layer 1.*shape"):
        Stage(copy, ALL)


def test_a_file_cut_short_is_refused(copy: Path) -> None:
    path = copy / _index(copy)["model.layers.1.mlp.up_proj.weight"]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelRefused, match="cut short"):
        Stage(copy, ALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: next(iter(h.values())).update(dtype="F8_E4M3"), "F8_E4M3"),
        (lambda h: next(iter(h.values())).update(shape=[1 << 60]), "wants"),
        (lambda h: next(iter(h.values())).update(shape=[-1]), "malformed"),
        (lambda h: next(iter(h.values())).pop("data_offsets"), "data_offsets"),
    ],
)
def test_a_header_that_lies_is_refused(copy: Path, change: Any, message: str) -> None:
    path = copy / _index(copy)["model.layers.1.mlp.up_proj.weight"]
    _edit_header(path, lambda header: change({k: v for k, v in header.items() if k != "__metadata__"}))
    with pytest.raises(ModelRefused, match=message):
        Stage(copy, ALL)


def test_an_index_may_not_point_out_of_its_folder(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "../other/model.safetensors"}}))
    with pytest.raises(ModelRefused, match="not a file of this folder"):
        Checkpoint(copy)


def test_weights_that_are_not_finite_are_refused_by_name(copy: Path) -> None:
    name = "model.layers.3.self_attn.q_proj.weight"
    path = copy / _index(copy)[name]
    tensors = load_file(path)
    tensors[name][3, 3] = float("nan")
    save_file(tensors, path)
    assert Stage(copy, LayerRange(0, 3)).packs
    with pytest.raises(ModelRefused, match=r"layer 3.*q_proj.*not finite"):
        Stage(copy, ALL)


@pytest.mark.parametrize("name", ["llama3_rope_tied", "llama", "gemma3"])
def test_w29_the_last_stage_has_the_head_that_belongs_to_it(tiny: Made, name: str) -> None:
    folder, model = tiny(name)
    tied = model.config.tie_word_embeddings
    assert tied == (name != "llama")
    checkpoint = Checkpoint(folder)
    source = next(n for n in checkpoint.files if ("embed_tokens" if tied else "lm_head") in n)
    last = build(folder, LayerRange(2, 4), "auto")
    head = last.model.get_output_embeddings().weight
    assert torch.equal(head, checkpoint.view(source))
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert _holds_nothing_private(last)


@pytest.mark.parametrize("cuts", [[0, 4], [0, 2, 4]])
def test_a_stored_head_counts_even_if_the_config_says_that_it_is_tied(tmp_path: Path, cuts: list[int]) -> None:
    model = reference("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    ids = some_ids(9, VOCABULARY)
    chain = Chain.cut(tmp_path, cuts)
    torch.testing.assert_close(chain.walk(chain.session(9), ids, [9]), whole(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("cuts", [[0, 4], [0, 2, 4]])
def test_a_tied_head_has_its_own_bias(tmp_path: Path, cuts: list[int]) -> None:
    model = reference("phi", tmp_path, tie_word_embeddings=True)
    assert model.lm_head.bias.detach().abs().max() > 0.1
    ids = some_ids(9, VOCABULARY)
    chain = Chain.cut(tmp_path, cuts)
    torch.testing.assert_close(chain.walk(chain.session(9), ids, [9]), whole(model, ids), atol=1e-5, rtol=0)


def _holds_nothing_private(skeleton: Any) -> bool:
    return all(skeleton.checkpoint.holds(parameter) for parameter in skeleton.model.parameters())


def test_tensors_that_no_module_wants_are_left_out(copy: Path) -> None:
    files = _index(copy)
    kept = {
        name: torch.ones(8) for name in ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq")
    }
    save_file(kept, copy / "kept.safetensors")
    (copy / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": files | dict.fromkeys(kept, "kept.safetensors")})
    )
    assert Stage(copy, ALL).packs


def test_a_middle_stage_holds_its_layers_only(tiny: Made) -> None:
    folder, _ = tiny("llama")
    middle = build(folder, LayerRange(1, 3), "auto")
    expected = {f"layer {n}: {name}" for n in (1, 2) for name in _index(folder) if f".layers.{n}." in name}
    assert set(middle.where.values()) == expected
    assert _holds_nothing_private(middle)


def test_a_single_file_loads_as_an_index_does(tiny: Made, tmp_path: Path) -> None:
    folder, model = tiny("llama")
    tensors: dict[str, torch.Tensor] = {}
    for file in set(_index(folder).values()):
        tensors |= load_file(folder / file)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    ids = some_ids(9, VOCABULARY)
    chain = Chain.cut(tmp_path, [0, 1, 4])
    torch.testing.assert_close(chain.walk(chain.session(9), ids, [9]), whole(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"num_kv_shared_layers": 2}, "cannot be cut"),
        ({"model_type": "t5"}, "encoder-decoder|not a causal"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "wide"}, "config.json.*hidden_size|config.json.*str"),
    ],
)
def test_models_that_cannot_be_served_are_refused(copy: Path, change: dict[str, Any], message: str) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelRefused, match=message):
        Stage(copy, ALL)


def test_code_in_the_folder_is_never_run(copy: Path) -> None:
    path = copy / "config.json"
    mark = copy / "ran"
    (copy / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    evil = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | evil))
    with pytest.raises(ModelRefused):
        Stage(copy, ALL)
    assert not mark.exists()


def test_layers_beyond_the_model_and_folders_without_one_are_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="has 4 layers"):
        Stage(copy, LayerRange(0, 5))
    with pytest.raises(ModelRefused, match="holds neither"):
        Stage(tmp_path, ALL)


@pytest.mark.parametrize("name", ["bloom", "lfm2"])
def test_an_architecture_that_packing_does_not_fit_is_found_out(
    tiny: Made, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Even on the list it would not be packed: ALiBi and convolutions never reach the attention function."""
    folder, model = tiny(name)
    monkeypatch.setattr(packing, "PACKABLE", packing.PACKABLE | {name})
    stage = Stage(folder, ALL)
    assert not stage.packs
    assert any("differ" in warning for warning in stage.warnings)
    ids = some_ids(12, VOCABULARY)
    chain = Chain([stage])
    torch.testing.assert_close(chain.walk(chain.session(9), ids, [9, 3]), whole(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "gemma3"])
def test_new_weights_in_bf16_are_packed_and_a_lost_cache_is_still_noticed(tmp_path: Path, name: str) -> None:
    """What untrained layers add to a residual is less than the rounding of residuals of any size."""
    for seed in range(3):
        folder = tmp_path / str(seed)
        reference(name, folder, torch.bfloat16, noise=0.0, seed=seed)
        for layers in (LayerRange(0, 2), LayerRange(1, 3)):
            stage = Stage(folder, layers)
            assert (stage.packs, stage.warnings) == (True, [])

            def forgets(layers: LayerRange, rows: torch.Tensor, ends: Sequence[int], stage: Stage = stage) -> Any:
                parts = zip([0, *ends[:-1]], ends, strict=True)
                return torch.cat([stage._chunks(layers, rows[start:end], [end - start]) for start, end in parts])

            assert not packing.agrees(stage._passes, forgets)


@pytest.mark.parametrize("positions", [20, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_fewer_positions_than_the_trials_have_rows(
    tmp_path: Path, dtype: torch.dtype, positions: int
) -> None:
    model = reference("gpt2", tmp_path, dtype, n_positions=positions)
    stage = Stage(tmp_path, ALL)
    assert stage.packs
    assert stage.deterministic == (dtype == torch.bfloat16)
    assert all(ms > 0 for ms in stage.measure())
    ids = some_ids(positions, VOCABULARY)
    chain = Chain([stage])
    got = chain.walk(chain.session(positions - 2), ids, [positions - 2, 1, 1])
    close = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got, whole(model, ids), atol=close, rtol=0)
    assert len(stage.lm_head(torch.zeros(positions + 1, stage.hidden_size, dtype=dtype))) == positions + 1


def test_progress_rises_to_one(copy: Path) -> None:
    seen: list[float] = []
    Stage(copy, ALL, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
