from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from meshd.errors import ModelRefused
from meshd.models.digest import make_manifest, verify_shard
from meshd.models.manifest import (
    MANIFEST_FILE,
    Manifest,
    as_dtype,
    parse_manifest_untrusted,
    read_manifest,
    write_manifest,
)
from meshd.models.tensor_hashes import TensorHashes
from meshd.vocabulary import LayerRange
from tests.models.checkpoints import CONFIG, HIDDEN, llama_plans, plan, write_model

WHOLE = LayerRange(0, 4)


def manifest_of(folder: Path) -> Manifest:
    return make_manifest(folder, "m", "test", TensorHashes(folder / "hashes.json"))


def with_manifest(folder: Path) -> Path:
    write_manifest(folder, manifest_of(folder))
    return folder


def spoil(folder: Path, tensor: str) -> None:
    """Change one byte of a tensor, in a new file as a copy would be."""
    record = read_manifest(folder).tensors[tensor]
    path = folder / record.file
    data = bytearray(path.read_bytes())
    where = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[tensor]["data_offsets"][0]
    data[8 + int.from_bytes(data[:8], "little") + where] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_how_tensors_lie_in_files_does_not_matter(tmp_path: Path) -> None:
    one, four = write_model(tmp_path / "one"), write_model(tmp_path / "four", files=4)
    assert manifest_of(one).spec.digest == manifest_of(four).spec.digest


def test_the_tool_that_wrote_the_config_does_not_matter(tmp_path: Path) -> None:
    reordered = dict(reversed(list(CONFIG.items()))) | {"transformers_version": "9", "_name_or_path": "/x"}
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two", config=reordered)
    assert manifest_of(one).spec.digest == manifest_of(two).spec.digest


def test_one_weight_one_setting_or_one_token_matters(tmp_path: Path) -> None:
    digests = {manifest_of(write_model(tmp_path / "a")).spec.digest}
    changed = [*llama_plans()[:-1], plan("lm_head.weight", (32, HIDDEN), data=b"\0\1" * 256)]
    digests.add(manifest_of(write_model(tmp_path / "b", changed)).spec.digest)
    digests.add(manifest_of(write_model(tmp_path / "c", config={**CONFIG, "rope_theta": 5.0})).spec.digest)
    (write_model(tmp_path / "d") / "chat_template.jinja").write_text("{{ messages }}")
    digests.add(manifest_of(tmp_path / "d").spec.digest)
    assert len(digests) == 4


def test_a_manifest_survives_the_disk(tmp_path: Path) -> None:
    folder = with_manifest(write_model(tmp_path / "m", files=2))
    assert read_manifest(folder) == manifest_of(folder)


@pytest.mark.parametrize("spoilt", ["digest", "tensor", "format", "shape", "spec"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, spoilt: str) -> None:
    folder = with_manifest(write_model(tmp_path / "m"))
    document = json.loads((folder / MANIFEST_FILE).read_text())
    tensor = document["tensors"]["lm_head.weight"]
    if spoilt == "digest":
        document["spec"]["digest"] = "0" * 32
    elif spoilt == "tensor":
        tensor["sha256"] = "0" * 64
    elif spoilt == "format":
        document["format"] = 2
    elif spoilt == "shape":
        tensor["shape"] = [-1]
    else:
        del document["spec"]["tied"]
    with pytest.raises(ModelRefused, match=MANIFEST_FILE):
        parse_manifest_untrusted(json.dumps(document).encode())


def test_a_shard_is_checked_by_its_own_tensors(tmp_path: Path) -> None:
    folder = with_manifest(write_model(tmp_path / "m"))
    hashes = TensorHashes(tmp_path / "hashes.json")
    assert len(verify_shard(folder, WHOLE, hashes)) == 11
    spoil(folder, "model.layers.3.self_attn.q_proj.weight")
    assert verify_shard(folder, LayerRange(0, 3), hashes)
    with pytest.raises(ModelRefused, match=r"model\.layers\.3\.self_attn\.q_proj\.weight' is damaged"):
        verify_shard(folder, LayerRange(2, 4), hashes)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = with_manifest(write_model(tmp_path / "m"))
    plans = [item for item in llama_plans() if item.name != "model.norm.weight"]
    (folder / "model.safetensors").unlink()
    write_model(folder, [*plans, plan("model.norm.weight", (2 * HIDDEN,))])
    hashes = TensorHashes(tmp_path / "hashes.json")
    with pytest.raises(ModelRefused, match=r"model\.norm\.weight' is BF16 \[16\], the manifest says BF16 \[8\]"):
        verify_shard(folder, LayerRange(3, 4), hashes)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_another_config_or_tokenizer_is_noticed(tmp_path: Path, file: str) -> None:
    folder = with_manifest(write_model(tmp_path / "m"))
    document = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**document, "added": 1}))
    with pytest.raises(ModelRefused, match="manifest"):
        verify_shard(folder, WHOLE, TensorHashes(tmp_path / "hashes.json"))


def test_a_shard_whose_file_is_missing_is_refused_and_the_other_is_not(tmp_path: Path) -> None:
    folder = with_manifest(write_model(tmp_path / "m", files=4))
    (folder / "model-00003-of-00004.safetensors").unlink()
    hashes = TensorHashes(tmp_path / "hashes.json")
    assert verify_shard(folder, LayerRange(0, 2), hashes)
    with pytest.raises(ModelRefused, match=r"model-00003-of-00004\.safetensors is missing"):
        verify_shard(folder, LayerRange(2, 4), hashes)


def test_hashes_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    folder = with_manifest(write_model(tmp_path / "m"))
    cache = tmp_path / "hashes.json"
    verify_shard(folder, LayerRange(0, 1), TensorHashes(cache))
    known = json.loads(cache.read_text())
    (identity,) = known
    known[identity] = dict.fromkeys(known[identity], "f" * 64)
    cache.write_text(json.dumps(known))
    with pytest.raises(ModelRefused, match="damaged"):  # the cache was believed
        verify_shard(folder, LayerRange(0, 1), TensorHashes(cache))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data)
    assert verify_shard(folder, LayerRange(0, 1), TensorHashes(cache))


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_cache_costs_only_time(tmp_path: Path, content: bytes) -> None:
    folder = with_manifest(write_model(tmp_path / "m"))
    cache = tmp_path / "hashes.json"
    cache.write_bytes(content)
    assert verify_shard(folder, WHOLE, TensorHashes(cache))


def test_another_dtype_is_another_model(tmp_path: Path) -> None:
    spec = manifest_of(write_model(tmp_path / "m")).spec
    assert as_dtype(spec, "bf16") is spec
    variants = [as_dtype(spec, dtype) for dtype in ("int8", "fp16", "fp32")]
    assert len({spec.digest, *(variant.digest for variant in variants)}) == 4
    assert [variant.name for variant in variants] == ["m@int8", "m@fp16", "m@fp32"]
    int8, fp16, fp32 = variants
    assert spec.layer_bytes[0] // 2 <= int8.layer_bytes[0] < spec.layer_bytes[0]
    assert int8.kv_bytes_per_token_layer == spec.kv_bytes_per_token_layer
    assert fp32.layer_bytes[0] == 2 * spec.layer_bytes[0]
    assert dataclasses.replace(fp16, name=spec.name, digest=spec.digest, dtype=spec.dtype) == spec
    with pytest.raises(ModelRefused, match="int3"):
        as_dtype(spec, "int3")
