"""What a stage can be asked to compute: the contract between a hop and whatever holds its layers.

Three things implement `Engine`: the torch worker behind a socket (`inference/worker_engine.py`), the hash engine, and fakes in
tests. A hop neither knows nor cares which. All state of a session, its KV and the boundary log (the rows this stage sent
downstream), is one object behind this interface: cut together, evicted together, one budget.

Rows are bytes: for ``layers.start == 0`` int32 little-endian token ids, else the residual in the model's dtype, row-major
``[n, hidden_size]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

from meshd.errors import MeshdError
from meshd.vocabulary import LayerRange, ModelSpec, SessionId


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the exit draws a token. Keyed by (seed, absolute position), so a replay or another replica draws the same.

    ``temperature`` 0 is greedy: the lowest id among the largest logits. ``top_k`` 0 and ``top_p`` 1 are off. ``logprobs`` is
    how many alternatives to return (None: no logprobs at all).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """True when the ids so far change the draw and must travel with the step."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One drawn token: the id for absolute position ``position``, with the greedy id and its logit beside it."""

    position: int
    token: int
    argmax: int
    logit: float
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One step of one session through ``layers``.

    ``rows`` holds positions ``[start, start + n)``. ``emit`` trailing rows come back (0: only fill the state). The session is
    truncated at ``start`` first, so re-sending a step, a corrected token or a rejected draft is always safe.
    ``prompt_len`` fixes the arithmetic: positions below it use block arithmetic, the others row arithmetic.
    ``reserve_tokens`` is how far the session may grow; it is granted with its first run or refused as Busy.
    ``sampling`` is given when the range ends the model: then choices come back instead of rows. The token drawn from row p is
    the one for position p + 1. ``history`` (generated ids before the first emitted row's token) only if `Sampling.needs_history`.
    """

    session: SessionId
    layers: LayerRange
    start: int
    n: int
    emit: int
    prompt_len: int
    rows: bytes
    reserve_tokens: int = 0
    sampling: Sampling | None = None
    history: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Opening:
    """A session's prompt, told before its rows: ``ids`` (int32 little-endian) whatever ``layers`` are, for a range in the middle
    sees no ids in its rows and must not take anybody's word for what was computed from them. What is kept of prompts never
    passes from one ``tenant`` to another. ``reserve_tokens`` as in the first run."""

    session: SessionId
    layers: LayerRange
    tenant: str
    ids: bytes
    reserve_tokens: int


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run made: the emitted residual rows, or the choices at the model's end. ``compute_ms`` excludes waiting."""

    rows: bytes = b""
    choices: tuple[Choice, ...] = ()
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    batch: int = 1


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is loaded. ``arith`` names the arithmetic: equal ``arith`` means bit-equal answers."""

    spec: ModelSpec
    layers: LayerRange
    dtype: str
    arith: str
    deterministic: bool
    generation: int
    layer_ms_1: float = 0.0
    layer_ms_64: float = 0.0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """``tick`` moves while the worker lives; ``busy_ms`` is the age of what it computes now (0: idle)."""

    tick: int = 0
    busy_ms: float = 0.0
    queue_depth: int = 0
    sessions: int = 0
    kv_used_bytes: int = 0
    kv_total_bytes: int = 0
    tokens_per_s: float = 0.0
    alive: bool = True
    reason: str = ""
    counters: dict[str, int] = field(default_factory=dict)


class Engine(Protocol):
    """Layers that can be run. Every call may raise `EngineFailed` (the worker died) or be cancelled safely."""

    @property
    def info(self) -> EngineInfo: ...

    def health(self) -> EngineHealth:
        """The last known state; never waits."""
        ...

    async def run(self, run: Run) -> Ran:
        """Compute one step. Raises NeedRows(have) if the session ends before ``start``, Busy when there is no room,
        RangeNotHeld for layers that are not loaded, BadTensor for rows of the wrong size or not finite."""
        ...

    async def boundary(self, session: SessionId, layers: LayerRange, start: int, end: int) -> bytes:
        """The rows ``[start, end)`` that this session's run of ``layers`` sent downstream. Raises NeedRows(have)."""
        ...

    async def open(self, opening: Opening) -> int:
        """Start a session with what is kept of its prompt; how many positions it has now (0: an engine may keep nothing).
        Never the last one, whose row must be computed to draw a token. A session that runs already is left alone."""
        ...

    def drop(self, session: SessionId) -> None:
        """A session has ended: forget it (all its ranges) but for what is kept of its prompt. Never waits, never fails."""
        ...

    async def forward(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        """Stateless: rows of positions 0..n in, residual (or, past the last layer, still residual) out."""
        ...

    async def lm_head(self, rows: bytes, n: int) -> bytes:
        """Stateless: final norm and head over residual rows; float32 logits ``[n, vocab_size]`` out."""
        ...

    async def aclose(self) -> None:
        """Stop, with a deadline; idempotent."""
        ...


Settle = Callable[[Ran | MeshdError], None]


class Submitting(Protocol):
    """What an engine should also be for whoever has many runs and a task for none of them: a task's start and its turns cost
    more than the step's message (measured: 90 of 200 us), and eight steps that go out one after the other arrive together."""

    def submit(self, run: Run, settle: Settle) -> Callable[[], None] | None:
        """As `Engine.run`, begun before this returns; ``settle`` is called once with what came of it, later or at once. What is
        returned withdraws the run: ``settle`` is not called any more. None: this run needs a task, nothing was begun."""
        ...


def submitting(engine: Engine | None) -> Submitting | None:
    """``engine`` as `Submitting`, if it is. Asked for every step: a look at the class takes a tenth of what `isinstance` takes
    with a protocol."""
    return cast(Submitting, engine) if hasattr(engine, "submit") else None


@runtime_checkable
class Embedding(Protocol):
    """What an engine that holds layer 0 also does for the tensor wire: entering the model without a session."""

    async def embed(self, rows: bytes, n: int) -> bytes:
        """Ids (int32 little-endian) in, the residual that enters layer 0 out."""
        ...

    async def forward_embedded(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        """`Engine.forward` for a range that starts at 0, given that residual instead of ids."""
        ...
