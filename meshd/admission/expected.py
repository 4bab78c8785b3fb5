"""What an honest stage answers to a probe: from a recorded qspec, or computed where the model is the rehearsal model.

Owns the making of `Case`: the rows that go in, in the stage's own dtype, and the rows that must come out. Is handed a qspec's
content and knows neither its file nor the store. Blocking, for milliseconds: call it in a thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from meshd.admission.qspec import COMPARED, EXACT, PROMPTS, GoldenPrompt, choose_prompts
from meshd.admission.rows import encode
from meshd.errors import BadTensor
from meshd.inference.engine import Sampling
from meshd.inference.hash_stage import ROW_BYTES, VOCABULARY, HashStage
from meshd.vocabulary import LayerRange

WIRE_DTYPES: Final = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "int8": "bf16", EXACT: EXACT}
"""dtype -> what its residuals travel as."""

_HASH_MARGIN: Final = 8.0  # a digest's head leaves no doubt


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt for one range: ``rows`` go in, ``want`` are the last four rows that must come out."""

    prompt: GoldenPrompt
    rows: bytes
    want: bytes


class Expected(Protocol):
    """What is expected of stages of one model."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    def cases(self, layers: LayerRange, dtype: str, rng: Random, count: int = PROMPTS) -> list[Case]:
        """Cases chosen afresh, the first of them to warm up with. Raises BadTensor for a dtype that cannot be probed,
        ModelRefused for a qspec that cannot be read."""
        ...


RecordedRows = Callable[[int, int, int, int], bytes]
"""(prompt, boundary, start, end) -> fp32 rows of positions ``[start, end)`` of that prompt entering layer ``boundary``."""


class RecordedModel:
    """`Expected` of a model with a qspec."""

    def __init__(
        self, golden: Sequence[GoldenPrompt], rows: RecordedRows, *, hidden_size: int, num_layers: int
    ) -> None:
        self._golden = golden
        self._rows = rows
        self.hidden_size = hidden_size
        self.num_layers = num_layers

    def cases(self, layers: LayerRange, dtype: str, rng: Random, count: int = PROMPTS) -> list[Case]:
        wire = WIRE_DTYPES.get(dtype)
        if wire is None or wire == EXACT:
            raise BadTensor(f"a stage of dtype {dtype!r} cannot be probed")
        return [self._case(i, layers, wire) for i in choose_prompts(self._golden, rng, count + 1)]

    def _case(self, index: int, layers: LayerRange, wire: str) -> Case:
        prompt = self._golden[index]
        n = len(prompt.ids)
        want = self._rows(index, layers.end, n - COMPARED, n)
        if layers.start == 0:
            return Case(prompt, struct.pack(f"<{n}i", *prompt.ids), want)
        return Case(prompt, encode(self._rows(index, layers.start, 0, n), wire), want)


class RehearsalModel:
    """`Expected` of the rehearsal model: whoever knows (L, seed) computes what anybody must answer."""

    def __init__(self, num_layers: int, seed: int) -> None:
        self._stage = HashStage(num_layers, seed)
        self.hidden_size = ROW_BYTES
        self.num_layers = num_layers

    def cases(self, layers: LayerRange, dtype: str, rng: Random, count: int = PROMPTS) -> list[Case]:
        if dtype != EXACT:
            raise BadTensor(f"the rehearsal model has no dtype {dtype!r}")
        return [self._case(layers, rng) for _ in range(count + 1)]

    def _case(self, layers: LayerRange, rng: Random) -> Case:
        n = rng.randint(9, 16)
        ids = tuple(rng.randrange(VOCABULARY) for _ in range(n))
        packed = struct.pack(f"<{n}i", *ids)
        rows = packed if layers.start == 0 else self._through(LayerRange(0, layers.start), packed, n)
        out = self._through(layers, rows, n)
        last = out[-COMPARED * ROW_BYTES :]
        argmax = (0,) * n
        if layers.end == self.num_layers:
            argmax = tuple(
                self._stage.choice(out[p * ROW_BYTES : (p + 1) * ROW_BYTES], p + 1, Sampling()).argmax for p in range(n)
            )
        return Case(GoldenPrompt(ids, argmax, (_HASH_MARGIN,) * n), rows, last)

    def _through(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        state = self._stage.fresh(layers)
        self._stage.extend(state, layers, self._stage.rows_in(layers, rows, n))
        return b"".join(state.log)
