from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshd.errors import ModelRefused
from meshd.models.convert import convert_gguf
from meshd.models.headers import read_header
from meshd.models.spec import open_folder, read_spec

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

HIDDEN, HEADS, KV_HEADS, VOCAB, LAYERS = 32, 4, 2, 8, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "Ċ"]


def permuted(weight: Any, heads: int) -> Any:
    """What llama.cpp's converter does to the rows of q and k."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def matrices(rng: Any) -> dict[str, Any]:
    found = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        found[f"blk.{layer}.attn_norm.weight"] = (HIDDEN,)
        found[f"blk.{layer}.attn_q.weight"] = (HIDDEN, HIDDEN)
        found[f"blk.{layer}.attn_k.weight"] = (KV_HEADS * HIDDEN // HEADS, HIDDEN)
        found[f"blk.{layer}.ffn_down.weight"] = (HIDDEN, 64)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in found.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, Any],
    architecture: str = "llama",
    change: Callable[[Any], None] = lambda _: None,
    pre: str = "smollm",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    change(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(source: Path, target: Path) -> dict[str, Any]:
    """The bf16 tensors of a conversion, as float32."""
    target.mkdir()
    convert_gguf(source, target)
    data = (target / "model.safetensors").read_bytes()
    found = {}
    for tensor in read_header(target / "model.safetensors"):
        bits = np.frombuffer(data[tensor.start : tensor.end], dtype="<u2").astype(np.uint32) << 16
        found[tensor.name] = bits.view(np.float32).reshape(tensor.shape)
    return found


def test_rotary_rows_are_put_back_for_llama_only(tmp_path: Path) -> None:
    tensors = matrices(np.random.default_rng(1))
    q, k = "blk.0.attn_q.weight", "blk.0.attn_k.weight"
    stored = tensors | {q: permuted(tensors[q], HEADS), k: permuted(tensors[k], KV_HEADS)}
    llama = converted(write_gguf(tmp_path / "l.gguf", stored), tmp_path / "llama")
    qwen = converted(write_gguf(tmp_path / "q.gguf", tensors, "qwen2", pre="qwen2"), tmp_path / "qwen")
    for found in (llama, qwen):
        for name, original in (("q_proj", tensors[q]), ("k_proj", tensors[k])):
            np.testing.assert_allclose(found[f"model.layers.0.self_attn.{name}.weight"], original, rtol=2**-8)


def test_values_are_rounded_to_the_nearest_even(tmp_path: Path) -> None:
    tensors = matrices(np.random.default_rng(1))
    tensors["output_norm.weight"][:3] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20]
    norm = converted(write_gguf(tmp_path / "x.gguf", tensors), tmp_path / "m")["model.norm.weight"]
    assert norm[:3].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


def test_the_folder_is_a_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "x.gguf", matrices(np.random.default_rng(1)))
    converted(source, tmp_path / "m")
    spec = read_spec(open_folder(tmp_path / "m"), "m", "d")
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.context) == (LAYERS, HIDDEN, VOCAB, 64)
    assert (spec.tied, spec.eos_ids, spec.bos_id) == (True, (2,), 1)
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert json.loads((tmp_path / "m/tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    assert tokenizer.encode("ab a<|im_end|>\n").ids == [5, 6, 3, 2, 7]


def test_the_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "x.gguf", matrices(np.random.default_rng(1)))
    digests = []
    for name in ("one", "two"):
        converted(source, tmp_path / name)
        files = sorted((tmp_path / name).iterdir())
        digests.append([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])
    assert digests[0] == digests[1]
    assert len(digests[0]) == 5


def test_a_begin_token_is_added_where_the_gguf_says_so(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tensors = matrices(np.random.default_rng(1))
    converted(write_gguf(tmp_path / "x.gguf", tensors, change=lambda w: w.add_add_bos_token(True)), tmp_path / "m")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    assert tokenizer.encode("a").ids == [1, 3]
    assert tokenizer.encode("a", add_special_tokens=False).ids == [3]


PIECES = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "<0x0A>": 0.0, "\u2581": -9.0, "a": -9.0, "b": -9.0, "c": -9.0}
PIECES |= {"ab": -1.0, "bc": -2.0, "\u2581a": -3.0, "\u2581abc": -4.0, "abc": -5.0}


def sentencepiece(writer: Any, *, prefix: bool = True) -> None:
    writer.kv_data[0].pop("tokenizer.ggml.pre")
    writer.kv_data[0].pop("tokenizer.ggml.merges")
    for key in ("model", "tokens", "token_type"):
        writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(PIECES))
    writer.add_token_scores(list(PIECES.values()))
    writer.add_token_types([2, 3, 3, 6, *[1] * (len(PIECES) - 4)])
    writer.add_add_space_prefix(prefix)


def test_a_sentencepiece_tokenizer_merges_by_score(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tensors = matrices(np.random.default_rng(1)) | {"token_embd.weight": np.ones((len(PIECES), HIDDEN), np.float32)}
    converted(write_gguf(tmp_path / "x.gguf", tensors, change=sentencepiece), tmp_path / "m")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    assert tokenizer.encode("abc\nb").tokens == ["<s>", "\u2581abc", "<0x0A>", "b"]
    assert tokenizer.encode("abc</s>", add_special_tokens=False).tokens == ["\u2581abc", "</s>"]
    assert tokenizer.decode(tokenizer.encode("a bc\n abc").ids) == "a bc\n abc"
    converted(write_gguf(tmp_path / "y.gguf", tensors, change=lambda w: sentencepiece(w, prefix=False)), tmp_path / "n")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "n/tokenizer.json"))
    assert tokenizer.encode("abc", add_special_tokens=False).tokens == ["abc"]


def test_a_gguf_without_a_tokenizer_is_a_model_without_one(tmp_path: Path) -> None:
    def drop(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.model")

    converted(write_gguf(tmp_path / "x.gguf", matrices(np.random.default_rng(1)), change=drop), tmp_path / "m")
    assert not (tmp_path / "m/tokenizer.json").exists()
    assert read_spec(open_folder(tmp_path / "m"), "m", "d").eos_ids == (2,)


@pytest.mark.parametrize(
    ("architecture", "pre", "change", "said"),
    [
        ("mamba", "smollm", lambda _: None, "architecture 'mamba'"),
        ("llama", "klingon", lambda _: None, "pre-tokenizer 'klingon'"),
        ("llama", "smollm", lambda w: w.add_expert_count(8), "experts"),
        ("llama", "smollm", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rope scaling 'yarn'"),
        ("llama", "smollm", lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), "rope_freqs"),
        ("llama", "smollm", lambda w: w.add_tensor("blk.0.odd.weight", np.ones(4, np.float32)), "'blk.0.odd.weight'"),
        ("llama", "smollm", lambda w: w.add_tensor("output.weight", np.full(4, np.nan, np.float32)), "not finite"),
    ],
)
def test_what_would_answer_wrongly_is_refused(
    tmp_path: Path, architecture: str, pre: str, change: Callable[[Any], None], said: str
) -> None:
    source = write_gguf(tmp_path / "x.gguf", matrices(np.random.default_rng(1)), architecture, change, pre)
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelRefused, match="GGUF") as refused:
        convert_gguf(source, tmp_path / "m")
    assert said in refused.value.message


@pytest.mark.parametrize("length", [0, 3, 24, 500])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, length: int) -> None:
    source = write_gguf(tmp_path / "x.gguf", matrices(np.random.default_rng(1)))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(source.read_bytes()[:length])
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelRefused, match=r"broken\.gguf is not a readable GGUF"):
        convert_gguf(broken, tmp_path / "m")
