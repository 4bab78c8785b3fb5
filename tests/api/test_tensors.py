from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from meshd.api.tensor_wire import Tensor, check_finite, decode_untrusted, encode, from_f32
from meshd.errors import BadTensor, RangeNotHeld
from meshd.inference.engine import EngineInfo
from meshd.inference.logits import most_rows
from meshd.vocabulary import LayerRange, ModelSpec
from tests.api.rig import SPEC, Rig, client

# --- the format -------------------------------------------------------------------------------------------------------


def test_the_library_reads_what_we_write() -> None:
    rows: Any = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    ids = np.array([5, 6], dtype=np.int64)
    body = encode({"hidden": Tensor("F32", rows.shape, rows.tobytes()), "tokens": Tensor("I64", (2,), ids.tobytes())})
    found = load(body)
    assert (found["hidden"] == rows).all()
    assert found["tokens"].tolist() == [5, 6]


def test_we_read_what_the_library_writes() -> None:
    rows: Any = np.arange(12, dtype=np.float16).reshape(3, 4)
    found = decode_untrusted(save({"hidden": rows}, metadata={"made": "here"}))
    assert found == {"hidden": Tensor("F16", (3, 4), rows.tobytes())}


@given(st.binary(max_size=200))
def test_garbage_raises_bad_tensor_only(body: bytes) -> None:
    with suppress(BadTensor):
        decode_untrusted(body)


header = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F99", 5, None]),
        "shape": st.lists(st.one_of(st.integers(-2, 5), st.just(1 << 62), st.booleans(), st.none()), max_size=6)
        | st.none(),
        "data_offsets": st.lists(st.integers(-1, 40), max_size=3) | st.just("x"),
    }
)


@given(st.dictionaries(st.text(max_size=3), header | st.integers() | st.none(), max_size=3), st.binary(max_size=40))
def test_a_lying_header_raises_bad_tensor_only(document: dict[str, Any], data: bytes) -> None:
    text = json.dumps(document).encode()
    try:
        found = decode_untrusted(struct.pack("<Q", len(text)) + text + data)
    except BadTensor:
        return
    for tensor in found.values():
        assert len(tensor.data) == math.prod(tensor.shape) * {"F32": 4, "BF16": 2, "I64": 8}[tensor.dtype]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 70_000) + b" " * 70_000,
        struct.pack("<Q", 50_000) + b"[" * 50_000,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}" + b"left over",
    ],
)
def test_what_is_no_safetensors_is_refused(body: bytes) -> None:
    with pytest.raises(BadTensor):
        decode_untrusted(body)


@settings(max_examples=200)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**126, min_value=-(2.0**126)),
        max_size=20,
    )
)
def test_bf16_is_rounded_to_nearest_even(values: list[float]) -> None:
    raw = np.array(values, dtype="<f4")
    found = np.frombuffer(from_f32(raw.tobytes(), "BF16"), dtype="<u2").astype("<u4") << 16
    words = raw.view("<u4").astype(np.uint64)
    expected = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16 << 16).astype("<u4")
    assert (found == expected).all()


@given(st.lists(st.integers(0, 0x7F7F), max_size=20))
def test_widened_bf16_comes_back_as_it_was(words: list[int]) -> None:
    narrow = np.array(words, dtype="<u2")
    wide = (narrow.astype("<u4") << 16).tobytes()
    assert from_f32(wide, "BF16") == narrow.tobytes()


def test_f16_and_its_limits() -> None:
    assert from_f32(np.array([1.5, -2.0], dtype="<f4").tobytes(), "F16") == np.array([1.5, -2.0], dtype="<f2").tobytes()
    with pytest.raises(BadTensor, match="beyond"):
        from_f32(np.array([1e9], dtype="<f4").tobytes(), "F16")
    with pytest.raises(BadTensor, match="finite"):
        from_f32(np.array([3.4e38], dtype="<f4").tobytes(), "BF16")


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(dtype: str, bad: float) -> None:
    name = {"<f4": "F32", "<f2": "F16"}[dtype]
    check_finite(np.array([1.0, 65504.0, 0.0], dtype=dtype).tobytes(), name)
    with pytest.raises(BadTensor):
        check_finite(np.array([1.0, bad], dtype=dtype).tobytes(), name)


# --- the endpoints ----------------------------------------------------------------------------------------------------


class AddingEngine:
    """Layer i adds i to every value; the embedding of an id is the id; the head's logits are the first value plus the id."""

    def __init__(self, held: LayerRange, dtype: str = "float32", spec: ModelSpec = SPEC) -> None:
        self.info = EngineInfo(spec, held, dtype, "a", True, 1)
        self.code = {"float32": "<f4", "float16": "<f2"}[dtype]

    async def embed(self, rows: bytes, n: int) -> bytes:
        ids = np.frombuffer(rows, dtype="<i4")
        return bytes(np.repeat(ids.astype(self.code)[:, None], SPEC.hidden_size, axis=1).tobytes())

    async def forward_embedded(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        values = np.frombuffer(rows, dtype=self.code).reshape(n, SPEC.hidden_size)
        return bytes((values + np.array(sum(range(layers.start, layers.end)), dtype=self.code)).tobytes())

    async def forward(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        if not self.info.layers.covers(layers):
            raise RangeNotHeld("no", held=self.info.layers)
        return await self.forward_embedded(layers, await self.embed(rows, n) if layers.start == 0 else rows, n)

    async def lm_head(self, rows: bytes, n: int) -> bytes:
        first = np.frombuffer(rows, dtype=self.code).reshape(n, SPEC.hidden_size)[:, :1].astype("<f4")
        return bytes((first + np.arange(self.info.spec.vocab_size, dtype="<f4")).tobytes())


def rig(held: tuple[int, int] = (0, 30), dtype: str = "float32") -> Rig:
    return Rig(engine=AddingEngine(LayerRange(*held), dtype))


IDS = np.array([[3, 4]], dtype=np.int64)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_whole_way_through_the_model(dtype: str) -> None:
    with client(rig(dtype=dtype)) as http:
        hidden = load(http.post("/embed", content=save({"tokens": IDS})).content)["hidden"]
        assert (hidden.shape, hidden.dtype) == ((1, 2, 4), np.dtype(dtype))
        half = http.post("/forward", content=save({"hidden": hidden}), headers={"X-Layer-Range": "0-15"}).content
        whole = http.post("/forward", content=half, headers={"X-Layer-Range": "15..30"}).content
        same = http.post("/forward", content=save({"tokens": IDS})).content
        logits = load(http.post("/lm-head", content=whole).content)["logits"]
    assert whole == same
    assert load(whole)["hidden"][0, :, 0].tolist() == [3 + sum(range(30)), 4 + sum(range(30))]
    assert (logits.shape, logits.dtype) == ((1, 2, SPEC.vocab_size), np.dtype(np.float32))
    assert logits[0, 1, 5] == 4 + sum(range(30)) + 5


def test_float32_is_taken_by_a_model_of_another_type() -> None:
    rows: Any = np.full((2, 4), 1.5, dtype=np.float32)
    with client(rig((15, 30), "float16")) as http:
        found = load(http.post("/forward", content=save({"hidden": rows}), headers={"X-Layer-Range": "15-16"}).content)
    assert (found["hidden"].dtype, found["hidden"].tolist()) == (np.dtype(np.float16), [[16.5] * 4] * 2)


@pytest.mark.parametrize(
    ("path", "layers", "body"),
    [
        ("/embed", None, {"tokens": IDS}),
        ("/forward", "0-15", {"tokens": IDS}),
        ("/forward", "14-16", {"hidden": np.zeros((1, 4), np.float32)}),
        ("/forward", "15-31", {"hidden": np.zeros((1, 4), np.float32)}),
        ("/lm-head", None, {"hidden": np.zeros((1, 4), np.float32)}),
    ],
)
def test_layers_that_are_not_held_are_409_and_say_which_are(path: str, layers: str | None, body: Any) -> None:
    with client(rig((15, 29))) as http:
        answer = http.post(path, content=save(body), headers={"X-Layer-Range": layers} if layers else {})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["layers"]) == (409, "range_not_held", [15, 29])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", b""),
        ("/embed", b"garbage, and more than eight bytes of it"),
        ("/embed", save({"hidden": np.zeros((1, 4), np.float32)})),
        ("/embed", save({"tokens": np.array([1.0], np.float32)})),
        ("/embed", save({"tokens": np.array([], np.int64)})),
        ("/embed", save({"tokens": np.array([-1], np.int64)})),
        ("/embed", save({"tokens": np.array([SPEC.vocab_size], np.int64)})),
        ("/embed", save({"tokens": np.zeros((2, 2), np.int64)})),
        ("/embed", save({"tokens": np.zeros(SPEC.context + 1, np.int64)})),
        ("/forward", save({"hidden": np.zeros((1, 5), np.float32)})),
        ("/forward", save({"hidden": np.zeros((1, 1, 1, 4), np.float32)})),
        ("/forward", save({"hidden": np.zeros((1, 4), np.float16)})),
        ("/forward", save({"hidden": np.array([[1, 2, 3, np.nan]], np.float32)})),
        ("/forward", save({"other": np.zeros((1, 4), np.float32)})),
        ("/lm-head", save({"hidden": np.zeros((0, 4), np.float32)})),
    ],
)
def test_a_bad_tensor_is_400(path: str, body: bytes) -> None:
    with client(rig()) as http:
        answer = http.post(path, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_tensor")


@pytest.mark.parametrize(
    ("dtype", "given", "taken"),
    [
        ("hash", np.float32, "must be U8, not F32"),
        ("float32", np.float16, "F32, not F16"),
        ("bf16", np.int64, "BF16 or F32, not I64"),
    ],
)
def test_the_types_that_are_taken_are_named(dtype: str, given: Any, taken: str) -> None:
    engine = AddingEngine(LayerRange(0, 30))
    engine.info = replace(engine.info, dtype=dtype)
    with client(Rig(engine=engine)) as http:
        answer = http.post("/forward", content=save({"hidden": np.zeros((1, 4), given)}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_tensor")
    assert answer.json()["error"]["message"].endswith(taken)


def test_more_logits_than_the_engine_would_give_are_400_with_the_most_there_may_be() -> None:
    spec = replace(SPEC, vocab_size=49_152, context=8192)
    engine = AddingEngine(LayerRange(0, 30), spec=spec)
    with client(Rig(engine=engine)) as http:
        most = http.post("/lm-head", content=save({"hidden": np.zeros((170, 4), np.float32)}))
        more = http.post("/lm-head", content=save({"hidden": np.zeros((171, 4), np.float32)}))
    assert load(most.content)["logits"].shape == (170, 49_152)
    assert (more.status_code, more.json()["error"]["code"]) == (400, "bad_tensor")
    assert "at most 170" in more.json()["error"]["message"]
    assert most_rows(49_152) == 170
    assert most_rows(1 << 30) == 1


def test_a_node_without_layers_and_a_range_that_is_none() -> None:
    with client(Rig()) as http:
        for path in ("/embed", "/forward", "/lm-head"):
            answer = http.post(path, content=save({"tokens": IDS}))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["layers"]) == (409, "range_not_held", None)
    with client(rig()) as http:
        answer = http.post("/forward", content=save({"tokens": IDS}), headers={"X-Layer-Range": "15-5"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Layer-Range")


def test_a_larger_body_than_elsewhere_is_taken() -> None:
    with client(rig()) as http:
        big = http.post("/forward", content=b"x" * (9 << 20))
        assert (big.status_code, big.json()["error"]["code"]) == (400, "bad_tensor")
        assert http.post("/chain", content=b"x" * (9 << 20)).status_code == 413
