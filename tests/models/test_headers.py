from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import ModelRefused
from meshd.models.headers import parse_header_untrusted, parse_index_untrusted, read_checkpoint, read_header
from tests.models.checkpoints import llama_plans, write_model

GOOD: dict[str, Any] = {
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
}


def parsed(header: dict[str, Any], data_bytes: int = 16) -> Any:
    text = json.dumps(header).encode()
    return parse_header_untrusted(text, "x.safetensors", 8 + len(text) + data_bytes)


def test_a_header_gives_names_dtypes_shapes_and_places(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    tensors = read_header(folder / "model.safetensors")
    assert [tensor.name for tensor in tensors] == [plan.name for plan in llama_plans()]
    first = tensors[0]
    assert (first.dtype, first.shape, first.size_bytes) == ("BF16", (32, 8), 512)
    assert first.start % 64 == 0
    with (folder / "model.safetensors").open("rb") as file:
        file.seek(first.start)
        assert file.read(first.size_bytes) == llama_plans()[0].load()


def test_the_official_reader_agrees(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    folder = write_model(tmp_path / "m")
    with safetensors.safe_open(folder / "model.safetensors", "np") as official:
        names = set(official.keys())
        shapes = {name: tuple(official.get_slice(name).get_shape()) for name in names}
    assert {tensor.name: tensor.shape for tensor in read_header(folder / "model.safetensors")} == shapes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": {"dtype": "Q9", "shape": [2, 3], "data_offsets": [0, 12]}}, "dtype 'Q9'"),
        ({"a": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 12]}}, "takes 16 bytes"),
        ({"a": {"dtype": "BF16", "shape": [2, -3], "data_offsets": [0, 12]}}, "damaged shape"),
        ({"a": {"dtype": "BF16", "shape": [2, True], "data_offsets": [0, 4]}}, "damaged shape"),
        ({"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12, 1]}}, "damaged shape"),
        ({"b": {"dtype": "F32", "shape": [], "data_offsets": [8, 12]}}, "'b' overlaps"),
        ({"b": {"dtype": "F32", "shape": [], "data_offsets": [16, 20]}}, "'b' leaves a hole"),
        ({"a": [1]}, "not described by an object"),
        ({"": {"dtype": "F32", "shape": [], "data_offsets": [16, 20]}}, "not a tensor name"),
    ],
)
def test_a_header_that_lies_is_refused(change: dict[str, Any], said: str) -> None:
    parsed(GOOD)
    with pytest.raises(ModelRefused, match=r"x\.safetensors") as refused:
        parsed(GOOD | change)
    assert said in refused.value.message


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "m") / "model.safetensors"
    data = whole.read_bytes()
    for length in (0, 7, 100, len(data) - 1):
        whole.write_bytes(data[:length])
        with pytest.raises(ModelRefused, match=r"model\.safetensors"):
            read_header(whole)


def test_a_repeated_key_is_refused() -> None:
    text = b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
    with pytest.raises(ModelRefused, match="twice"):
        parse_header_untrusted(text, "x", 8 + len(text) + 4)


@given(st.binary(max_size=200))
def test_any_bytes_give_tensors_or_a_refusal(data: bytes) -> None:
    with contextlib.suppress(ModelRefused):
        assert isinstance(parse_header_untrusted(data, "x", 8 + len(data)), tuple)


@given(st.data())
def test_one_changed_byte_never_breaks_the_reader(data: st.DataObject) -> None:
    text = bytearray(json.dumps(GOOD).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(0, 255))
    try:
        tensors = parse_header_untrusted(bytes(text), "x", 8 + len(text) + 16)
    except ModelRefused:
        return
    assert sum(tensor.size_bytes for tensor in tensors) == 16


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "x.bin", ".safetensors", 3, "x\0.safetensors"]
)
def test_an_index_cannot_point_out_of_its_folder(place: Any) -> None:
    text = json.dumps({"weight_map": {"a": place}}).encode()
    with pytest.raises(ModelRefused, match="not a safetensors file of this folder"):
        parse_index_untrusted(text, "index")


def test_a_checkpoint_in_files_is_the_same_checkpoint(tmp_path: Path) -> None:
    one, four = write_model(tmp_path / "one"), write_model(tmp_path / "four", files=4)
    assert read_checkpoint(one).names == read_checkpoint(four).names
    assert not read_checkpoint(four).absent


def test_a_missing_file_is_an_error_only_for_those_who_need_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", files=4)
    lost = "model-00003-of-00004.safetensors"
    (folder / lost).unlink()
    checkpoint = read_checkpoint(folder)
    assert checkpoint.need(["model.embed_tokens.weight"])[0].shape == (32, 8)
    with pytest.raises(ModelRefused, match=r"model-00003-of-00004\.safetensors is missing") as refused:
        checkpoint.need(["model.layers.2.input_layernorm.weight"])
    assert "layer 2" in refused.value.message


def test_a_damaged_file_is_one_only_for_those_who_need_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", files=4)
    hurt = folder / "model-00003-of-00004.safetensors"
    hurt.write_bytes(hurt.read_bytes()[:-1])
    checkpoint = read_checkpoint(folder)
    assert checkpoint.need(["model.embed_tokens.weight"])
    with pytest.raises(ModelRefused, match=r"model-00003-of-00004\.safetensors has .*layer 2"):
        checkpoint.need(["model.layers.2.input_layernorm.weight"])
    with pytest.raises(ModelRefused, match="cut off or damaged"):
        checkpoint.refuse_damaged()


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", files=2)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places["model.layers.3.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelRefused, match=r"model\.layers\.3\.extra"):
        read_checkpoint(folder)


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelRefused, match="only safetensors"):
        read_checkpoint(tmp_path)
