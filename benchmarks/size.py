"""A model of 7 billion parameters in two halves: what each node reads and keeps, and whether the halves say what the whole says.

The checkpoint has the shape of Mistral 7B (14.5 GB in bf16) and random weights; it is written here and removed afterwards. Two
engine workers take half of the layers each, then one takes them all; residual and logits of 32 positions must be equal to the
bit. Read is what a worker has mapped of the file, private what it has beside that. Skipped with a row that says so where disk or
memory is short. ``SIZE_LAYERS`` (32) makes a smaller one.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import trio

from benchmarks import Recorder
from benchmarks._clients import random_ids
from meshd.chain.attempts import pack_ids
from meshd.inference.engine import Run
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.models.checkpoint_writer import TensorPlan, write_safetensors
from meshd.models.spec import open_folder, read_spec
from meshd.vocabulary import MB, LayerRange, ModelSpec, SessionId
from tests.rooms import mapped_bytes

LAYERS = int(os.environ.get("SIZE_LAYERS", "32"))
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 32000
POSITIONS = 32
SLACK = 1.15  # of disk and memory, beyond the file itself
RANDOM_BYTES = 64 * MB  # tensors are cut from this, each from a place of its own
CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def run() -> None:
    recorder = Recorder("size")
    shapes = list(_shapes())
    size_bytes = sum(2 * _count(shape) for _, shape in shapes)
    place = Path(tempfile.gettempdir())
    disk, memory = shutil.disk_usage(place).free, psutil.virtual_memory().available
    if min(disk, memory) < SLACK * size_bytes:
        recorder.row(
            skipped=f"{size_bytes // MB} MB wanted, {disk // MB} MB of disk and {memory // MB} MB of memory free"
        )
        return
    with tempfile.TemporaryDirectory(prefix="meshd-size-", dir=place) as folder:
        _write(Path(folder), shapes)
        spec = read_spec(open_folder(Path(folder)), "mistral-shape", f"sha256:{secrets.token_hex(32)}")
        trio.run(_compare, recorder, Path(folder), spec, size_bytes)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    width = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (HIDDEN,)
        yield at + "self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield at + "self_attn.k_proj.weight", (width, HIDDEN)
        yield at + "self_attn.v_proj.weight", (width, HIDDEN)
        yield at + "self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield at + "post_attention_layernorm.weight", (HIDDEN,)
        yield at + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield at + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield at + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def _write(folder: Path, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = random.Random(7)
    # bf16 of the size of trained weights: sign and mantissa from chance, exponents of 2^-7 .. 2^-6.
    raw = bytearray(rng.randbytes(RANDOM_BYTES))
    raw[1::2] = bytes(0x3C | byte & 0x80 for byte in raw[1::2])
    stock = bytes(raw)

    def cut(start: int, size: int) -> bytes:
        turns = -(-(start + size) // len(stock))
        return (stock * turns)[start : start + size]

    plans = []
    for name, shape in shapes:
        size = 2 * _count(shape)
        one = b"\x80\x3f" * (size // 2)  # a norm's weights: 1.0
        load = (lambda one=one: one) if len(shape) == 1 else partial(cut, 2 * rng.randrange(RANDOM_BYTES // 2), size)
        plans.append(TensorPlan(name, "BF16", shape, size, load))
    write_safetensors(folder / "model.safetensors", plans)


async def _compare(recorder: Recorder, folder: Path, spec: ModelSpec, size_bytes: int) -> None:
    half = spec.num_layers // 2
    ids = random_ids("size", POSITIONS, spec.vocab_size)
    halves = await _answers(recorder, folder, spec, [LayerRange(0, half), LayerRange(half, spec.num_layers)], ids)
    whole = await _answers(recorder, folder, spec, [spec.whole], ids, cut=half)
    recorder.row(
        parameters=size_bytes // 2,
        positions=POSITIONS,
        residual_equal=halves[0] == whole[0],
        logits_equal=halves[1] == whole[1],
    )
    if halves != whole:
        raise RuntimeError("two halves and the whole differ")


async def _answers(
    recorder: Recorder, folder: Path, spec: ModelSpec, held: Sequence[LayerRange], ids: list[int], *, cut: int = 0
) -> tuple[bytes, bytes]:
    """The residual at the middle and the logits, over workers that hold ``held``. ``cut``: one worker runs both
    halves after each other."""
    options = WorkerOptions(prepack="off", kv_bytes=64 * MB)
    async with trio.open_nursery() as nursery:
        engines = [
            await WorkerEngine.spawn(nursery, folder, spec, layers, generation=1, log=print, options=options)
            for layers in held
        ]
        session, rows, residual = SessionId(secrets.token_hex(16)), pack_ids(ids), b""
        ranges = [LayerRange(0, cut), LayerRange(cut, spec.num_layers)] if cut else list(held)
        n = len(ids)
        for layers, engine in zip(ranges, engines * len(ranges), strict=False):
            rows = (await engine.run(Run(session, layers, 0, n, n, n, rows, n))).rows
            residual = residual or rows
        logits = await engines[-1].lm_head(rows, n)
        for layers, engine in zip(held, engines, strict=True):
            recorder.row(
                layers=str(layers),
                of_file=spec.weight_bytes(layers) // MB,
                read_mb=mapped_bytes(engine.pid, "RssFile") // MB,
                private_mb=mapped_bytes(engine.pid, "RssAnon") // MB,
            )
            await engine.aclose()
        nursery.cancel_scope.cancel()
    return residual, logits


if __name__ == "__main__":
    run()
