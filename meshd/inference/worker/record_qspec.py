"""Records a model's qspec: ``python -m meshd.inference.worker.record_qspec FOLDER [--out FILE]``.

A process of its own, so that whoever pulls a model stays without torch. The golden prompts go through the model in float32,
read from the folder's files with no more than one large layer, or a few small ones, in memory; the result is renamed into
place when it is whole. On one device two recordings are equal byte for byte; other devices may differ in the last bits of a
float (measured: 3e-6), far below what a probe allows.

stdout: a line ``LAYERS_DONE LAYERS`` for each layer. stderr: one line, if it failed. Exit 0 or 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from meshd.errors import MeshdError, ModelRefused
from meshd.inference.worker.stage import Item, Stage
from meshd.inference.worker.tensors import tensor_bytes
from meshd.models.disk import disk_errors
from meshd.models.golden import golden_prompts
from meshd.models.headers import JSON_CAP_BYTES, parse_json_untrusted, read_capped
from meshd.models.manifest import read_manifest
from meshd.models.qspec_file import QspecWriter
from meshd.models.spec import VALUE_BYTES
from meshd.models.store import QSPEC_FILE
from meshd.vocabulary import MB, LayerRange, ModelSpec

_AT_ONCE_BYTES: Final = 256 * MB
_NICE: Final = 5  # whatever this device serves meanwhile goes first


def record(folder: Path, out: Path | None = None, progress: Callable[[int, int], None] = lambda *_: None) -> Path:
    """Write the qspec of the model in ``folder`` (which has a manifest) to ``out``, by default beside the model."""
    out = out or folder / QSPEC_FILE
    manifest = read_manifest(folder)
    if manifest.missing_files:
        raise ModelRefused(f"{folder} lacks {manifest.missing_files[0]}: a qspec needs every layer")
    spec = manifest.spec
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    prompts = golden_prompts(spec.vocab_size, _meaningful(folder, spec))
    try:
        with disk_errors(out.parent):
            _fill(QspecWriter(draft, spec, prompts), prompts, folder, spec, progress)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return out


def _fill(
    writer: QspecWriter,
    prompts: tuple[tuple[int, ...], ...],
    folder: Path,
    spec: ModelSpec,
    progress: Callable[[int, int], None],
) -> None:
    rows: list[torch.Tensor] = []
    for held in _pieces(spec):
        stage = Stage(folder, held, dtype="fp32", threads=os.cpu_count() or 1, deterministic=False, prepack="off")
        if held.start == 0:
            rows = [stage.embed(torch.tensor(ids)).clone() for ids in prompts]
            _put(writer, 0, rows)
        for layer in range(held.start, held.end):
            here = LayerRange(layer, layer + 1)
            items = [Item(stage.state(here), 0, len(part), len(part), len(part), part) for part in rows]
            rows = stage.step(here, items, logits=False)
            _put(writer, here.end, rows)
            progress(here.end, spec.num_layers)
        if held.end == spec.num_layers:
            for number, part in enumerate(rows):
                _put_ends(writer, number, stage.lm_head(part))


def _pieces(spec: ModelSpec) -> Iterator[LayerRange]:
    """Layers to hold at once: one, or as many small ones as fit `_AT_ONCE_BYTES`, since each beginning costs a second."""
    widened = 4 // VALUE_BYTES[spec.dtype]
    start = 0
    for end in range(1, spec.num_layers + 1):
        whole = end == spec.num_layers
        if whole or widened * sum(spec.layer_bytes[start : end + 1]) > _AT_ONCE_BYTES:
            yield LayerRange(start, end)
            start = end


def _put_ends(writer: QspecWriter, prompt: int, logits: torch.Tensor) -> None:
    best = logits.topk(2, dim=-1).values
    # argmax and not topk's first: of equal logits the lowest id is the greedy one, as in sampling
    writer.ends(prompt, logits.argmax(-1).tolist(), (best[:, 0] - best[:, 1]).tolist())


def _put(writer: QspecWriter, boundary: int, rows: list[torch.Tensor]) -> None:
    for number, part in enumerate(rows):
        if not bool(torch.isfinite(part).all()):
            raise ModelRefused(f"the model's own residual before layer {boundary} is not finite")
        writer.residual(number, boundary, tensor_bytes(part))


def _meaningful(folder: Path, spec: ModelSpec) -> frozenset[int]:
    """Ids that stand for something other than text."""
    found = set(spec.eos_ids) | ({spec.bos_id} if spec.bos_id is not None else set())
    with contextlib.suppress(ModelRefused):
        tokenizer = parse_json_untrusted(read_capped(folder / "tokenizer.json", JSON_CAP_BYTES), "tokenizer.json")
        added = tokenizer.get("added_tokens")
        found |= {token["id"] for token in added or () if isinstance(token, dict) and type(token.get("id")) is int}
    return frozenset(found)


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="record_qspec")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
    try:
        record(given.folder, given.out, _tell)
    except MeshdError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


def _tell(done: int, total: int) -> None:
    sys.stdout.write(f"{done} {total}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
