"""The qspec file: what an honest model computes for the golden prompts, at every boundary between layers.

Owns the layout of ``qspec.safetensors``. Per prompt ``K`` of n tokens::

    prompt.K.ids       I32 [n]
    prompt.K.argmax    I32 [n]        greedy id after each position
    prompt.K.margin    F32 [n]        distance of the two best logits there
    prompt.K.residual  F32 [L+1, n, hidden]   before layer 0, after it, ..., after the last layer

metadata: format, digest (of the model in its file's dtype), tool. Reading seeks to the rows that are wanted and never takes the
whole file into memory (SmolLM2-135M: 11 MB, an 8B model: 80 MB); it needs neither numpy nor safetensors. A file may come from
a peer, so everything in it is checked against the model's spec. Errors: ModelRefused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from meshd import __version__
from meshd.errors import ModelRefused
from meshd.models.checkpoint_writer import encode_header
from meshd.models.golden import LONGEST_TOKENS
from meshd.models.headers import HEADER_CAP_BYTES, TensorInfo, parse_header_untrusted, parse_json_untrusted
from meshd.vocabulary import ModelSpec

FORMAT: Final = "meshd qspec 1"
PROMPTS_CAP: Final = 64
_VALUE_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """``argmax[p]`` and ``margin[p]`` belong to the logits after position p."""

    ids: tuple[int, ...]
    argmax: tuple[int, ...]
    margin: tuple[float, ...]


class QspecFile:
    """A qspec that is there and fits the model described by ``spec`` (of the file's own dtype)."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path = path
        self.digest = spec.digest
        self._hidden_size = spec.hidden_size
        self._boundaries = spec.num_layers + 1
        tensors = _read_header(path, spec.digest)
        self._places: list[TensorInfo] = []
        prompts: list[RecordedPrompt] = []
        try:
            with path.open("rb") as file:
                while (residual := tensors.get(f"prompt.{len(prompts)}.residual")) is not None:
                    number = len(prompts)
                    parts = [tensors[f"prompt.{number}.{what}"] for what in ("ids", "argmax", "margin")]
                    n = residual.shape[1] if len(residual.shape) == 3 else 0
                    _check_shapes(residual, parts, (self._boundaries, n, spec.hidden_size))
                    ids, argmax, margin = (_read(file, part.start, part.size_bytes) for part in parts)
                    prompts.append(_prompt(ids, argmax, margin, n, spec))
                    self._places.append(residual)
        except (KeyError, OSError) as error:
            raise ModelRefused(f"{path} is damaged: {error!r}") from error
        if not 0 < len(prompts) <= PROMPTS_CAP:
            raise ModelRefused(f"{path} holds {len(prompts)} golden prompts")
        self.golden: tuple[RecordedPrompt, ...] = tuple(prompts)

    def rows(self, prompt: int, boundary: int, start: int, end: int) -> bytes:
        """fp32 residual rows of positions ``[start, end)``, entering layer ``boundary``."""
        place, n = self._places[prompt], len(self.golden[prompt].ids)
        if not (0 <= boundary < self._boundaries and 0 <= start <= end <= n):
            raise ModelRefused(f"{self.path} has no rows {start}..{end} at boundary {boundary}")
        row_bytes = self._hidden_size * _VALUE_BYTES
        try:
            with self.path.open("rb") as file:
                return _read(file, place.start + (boundary * n + start) * row_bytes, (end - start) * row_bytes)
        except OSError as error:
            raise ModelRefused(f"{self.path} cannot be read: {error}") from error


class QspecWriter:
    """Fills a qspec boundary by boundary, in whatever order the layers are computed. Bytes depend on what is put only."""

    def __init__(self, path: Path, spec: ModelSpec, prompts: Sequence[tuple[int, ...]]) -> None:
        self.path = path
        self._row_bytes = spec.hidden_size * _VALUE_BYTES
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        for number, ids in enumerate(prompts):
            n = len(ids)
            shape = (spec.num_layers + 1, n, spec.hidden_size)
            entries += [(f"prompt.{number}.{what}", "I32", (n,), 4 * n) for what in ("ids", "argmax")]
            entries.append((f"prompt.{number}.margin", "F32", (n,), 4 * n))
            entries.append((f"prompt.{number}.residual", "F32", shape, shape[0] * n * self._row_bytes))
        header = encode_header(entries, {"format": FORMAT, "digest": spec.digest, "tool": f"meshd {__version__}"})
        size = len(header) + sum(entry[3] for entry in entries)
        self._places = {tensor.name: tensor for tensor in parse_header_untrusted(header[8:], path.name, size)}
        self._lengths = [len(ids) for ids in prompts]
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)
        for number, ids in enumerate(prompts):
            self._put(f"prompt.{number}.ids", struct.pack(f"<{len(ids)}i", *ids))

    def residual(self, prompt: int, boundary: int, rows: bytes) -> None:
        """All rows of ``prompt`` that enter layer ``boundary``."""
        size = self._lengths[prompt] * self._row_bytes
        if len(rows) != size:
            raise ModelRefused(f"{len(rows)} bytes are not the rows of golden prompt {prompt}")
        self._put(f"prompt.{prompt}.residual", rows, boundary * size)

    def ends(self, prompt: int, argmax: Sequence[int], margin: Sequence[float]) -> None:
        """What the head makes of the last boundary."""
        self._put(f"prompt.{prompt}.argmax", struct.pack(f"<{len(argmax)}i", *argmax))
        self._put(f"prompt.{prompt}.margin", struct.pack(f"<{len(margin)}f", *margin))

    def _put(self, name: str, data: bytes, offset: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(self._places[name].start + offset)
            file.write(data)


def _read_header(path: Path, digest: str) -> dict[str, TensorInfo]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_CAP_BYTES):
                raise ModelRefused(f"{path} is not a qspec, or is cut off ({size} bytes)")
            header = file.read(length)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error
    metadata = parse_json_untrusted(header, path.name).get("__metadata__")
    if not isinstance(metadata, Mapping) or metadata.get("format") != FORMAT:
        raise ModelRefused(f"{path} is no qspec of this version: 'meshd qspec MODEL' records it again")
    if metadata.get("digest") != digest:
        raise ModelRefused(f"{path} is the qspec of model {str(metadata.get('digest'))[:32]}, not of {digest}")
    return {tensor.name: tensor for tensor in parse_header_untrusted(header, path.name, size)}


def _check_shapes(residual: TensorInfo, parts: Sequence[TensorInfo], shape: tuple[int, int, int]) -> None:
    n = shape[1]
    right = residual.dtype == "F32" and residual.shape == shape and 4 <= n <= LONGEST_TOKENS
    for part, dtype in zip(parts, ("I32", "I32", "F32"), strict=True):
        right = right and part.dtype == dtype and part.shape == (n,)
    if not right:
        raise ModelRefused(f"{residual.file}: {residual.name!r} does not fit the model")


def _prompt(ids: bytes, argmax: bytes, margin: bytes, n: int, spec: ModelSpec) -> RecordedPrompt:
    found = RecordedPrompt(
        struct.unpack(f"<{n}i", ids), struct.unpack(f"<{n}i", argmax), struct.unpack(f"<{n}f", margin)
    )
    if not all(0 <= token < spec.vocab_size for token in (*found.ids, *found.argmax)):
        raise ModelRefused("a golden prompt has ids outside of the model's vocabulary")
    return found


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    data = file.read(size)
    if len(data) != size:
        raise ModelRefused("a qspec is cut off")
    return data
