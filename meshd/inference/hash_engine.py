"""The rehearsal model as an `Engine`: runs in the daemon's own process, needs no weights and no worker.

Owns when things run: one forward at a time, and everything that waits when a forward starts shares it, so concurrent sessions
overlap as they do on a real stage. A forward sleeps ``step_ms`` times its share of the model's layers, whatever its rows.
The arithmetic and the state are `hash_stage`'s.

There is no scheduler task. Whoever holds the lock runs the batch for all who wait; a waiter that is cancelled while it leads
puts the others' jobs back, and the next holder of the lock takes them. Times are milliseconds where named so.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from meshd.errors import EngineFailed, MeshdError, NeedRows, RangeNotHeld
from meshd.inference.engine import EngineHealth, EngineInfo, Opening, Ran, Run, Sampling, Settle
from meshd.inference.hash_stage import ROW_BYTES, VOCABULARY, HashSessions, HashStage
from meshd.inference.prefix_cache import PrefixCache
from meshd.inference.rate import Rate
from meshd.vocabulary import LayerRange, ModelSpec, SessionId

DEFAULT_KV_BYTES = 1 << 30
MAX_BATCH = 32
SHORT_ROWS = 16  # more are worth a turn of the others


@dataclass(slots=True)
class _Job:
    run: Run
    arrived: float
    result: Ran | MeshdError | None = None


class HashEngine:
    """Layers ``layers`` of the hash model described by ``spec``."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: LayerRange,
        *,
        seed: int = 0,
        step_ms: float = 0.0,
        generation: int = 1,
        kv_bytes: int = DEFAULT_KV_BYTES,
        max_batch: int = MAX_BATCH,
        prefix_bytes: int | None = None,
        prefix_ttl_s: float = 3600.0,
    ) -> None:
        if layers.end > spec.num_layers:
            raise RangeNotHeld(f"{spec.name} has {spec.num_layers} layers, not {layers}")
        self._stage = HashStage(spec.num_layers, seed)
        self._sessions = HashSessions(
            self._stage,
            layers,
            kv_bytes=kv_bytes,
            bytes_per_token_layer=max(1, spec.kv_bytes_per_token_layer),
            prefixes=PrefixCache(kv_bytes // 2 if prefix_bytes is None else min(kv_bytes, prefix_bytes), prefix_ttl_s),
        )
        self.step_ms = step_ms
        self._max_batch = max_batch
        layer_ms = step_ms / spec.num_layers
        self._info = EngineInfo(
            spec=spec,
            layers=layers,
            dtype=spec.dtype,
            arith="hash",
            deterministic=True,
            generation=generation,
            layer_ms_1=layer_ms,
            layer_ms_64=layer_ms,
        )
        self._lock = trio.Lock()
        self._waiting: deque[_Job] = deque()
        self._batch: list[_Job] = []  # of the forward that runs
        self._closed = False
        self._forwards = 0
        self._forward_began: float | None = None
        self._rate = Rate()  # of rows behind prompts, as a worker tells it

    @property
    def info(self) -> EngineInfo:
        return self._info

    def health(self) -> EngineHealth:
        busy_ms = 0.0 if self._forward_began is None else (trio.current_time() - self._forward_began) * 1000.0
        return EngineHealth(
            tick=self._forwards,
            busy_ms=busy_ms,
            queue_depth=len(self._waiting),
            sessions=len(self._sessions),
            kv_used_bytes=self._sessions.kv_used_bytes,
            kv_total_bytes=self._sessions.kv_total_bytes,
            tokens_per_s=self._rate.per_s(trio.current_time()),
            alive=not self._closed,
            reason="closed" if self._closed else "",
            counters={"forwards": self._forwards},
        )

    async def run(self, run: Run) -> Ran:
        job = _Job(run, trio.current_time())
        self._waiting.append(job)
        try:
            async with self._lock:
                if job.result is None and not self._closed:
                    await self._forward()
        except trio.Cancelled:
            if job in self._waiting:
                self._waiting.remove(job)
            raise
        if isinstance(job.result, MeshdError):
            raise job.result
        if job.result is None:
            raise EngineFailed("the engine was closed")
        return job.result

    def submit(self, run: Run, settle: Settle) -> Callable[[], None] | None:
        """`Submitting`, for short runs of a model that takes no time."""
        if self.step_ms > 0.0 or run.n > SHORT_ROWS or self._waiting or self._lock.locked() or self._closed:
            return None
        job = _Job(run, trio.current_time())
        self._compute([job], job.arrived)
        if job.result is not None:
            settle(job.result)
        return _nothing

    async def _forward(self) -> None:
        """One forward over everything that waits, up to a batch. Called with the lock held."""
        batch = self._batch = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
        began = self._forward_began = trio.current_time()
        share = max(len(job.run.layers) for job in batch) / self._stage.num_layers
        try:
            await trio.sleep(self.step_ms * share / 1000.0)
        except trio.Cancelled:
            self._waiting.extendleft(job for job in reversed(batch) if job.result is None)
            raise
        finally:
            self._forward_began, self._batch = None, []
        if not self._closed:
            self._compute(batch, began)

    def _compute(self, batch: Sequence[_Job], began: float) -> None:
        self._forwards += 1
        now = trio.current_time()
        batch = [job for job in batch if job.result is None]
        for job in batch:
            job.result = self._run_one(job, began, len(batch))
        behind = sum(max(0, job.run.start + job.run.n - max(job.run.start, job.run.prompt_len)) for job in batch)
        self._rate.add(behind, now)

    def _run_one(self, job: _Job, began: float, batch: int) -> Ran | MeshdError:
        try:
            ran = self._sessions.run(job.run, trio.current_time())
        except MeshdError as error:
            return error
        took_ms = (trio.current_time() - began) * 1000.0
        return Ran(ran.rows, ran.choices, took_ms, max(0.0, began - job.arrived) * 1000.0, batch)

    async def boundary(self, session: SessionId, layers: LayerRange, start: int, end: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._sessions.boundary(session, layers, start, end)

    async def open(self, opening: Opening) -> int:
        self._check_held(opening.layers)
        have = self._sessions.open(opening, trio.current_time())
        await trio.lowlevel.checkpoint()  # not before: a session that is dropped meanwhile would be there again
        return have

    def drop(self, session: SessionId) -> None:
        """Also what waits or is under way for it: computed later, it would make the session anew, for good."""
        for job in (*self._waiting, *self._batch):
            if job.run.session == session and job.result is None:
                job.result = NeedRows(0)
        self._waiting = deque(job for job in self._waiting if job.result is None)
        self._sessions.drop(session)

    def evict(self, session: SessionId, layers: LayerRange) -> None:
        """Forget one state, as memory pressure would (rehearsals and tests)."""
        self._sessions.evict(session, layers)

    async def embed(self, rows: bytes, n: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self._check_held(LayerRange(0, 1))
        return b"".join(self._stage.rows_in(LayerRange(0, 1), rows, n))

    async def forward(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        self._check_held(layers)
        return await self._forward_rows(layers, self._stage.rows_in(layers, rows, n))

    async def forward_embedded(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        self._check_held(layers)
        return await self._forward_rows(layers, self._stage.rows_in(LayerRange(1, 2), rows, n))  # residual, as within

    def _check_held(self, layers: LayerRange) -> None:
        if not self._info.layers.covers(layers):
            raise RangeNotHeld(f"layers {layers} are not held here, {self._info.layers} are", held=self._info.layers)

    async def _forward_rows(self, layers: LayerRange, rows: list[bytes]) -> bytes:
        share = len(layers) / self._stage.num_layers
        await trio.sleep(self.step_ms * share / 1000.0)
        state = self._stage.fresh(layers)
        self._stage.extend(state, layers, rows)
        return b"".join(state.log)

    async def lm_head(self, rows: bytes, n: int) -> bytes:
        """The greedy id has its logit, every other id zero: enough for an argmax and its margin."""
        await trio.lowlevel.checkpoint()
        self._stage.rows_in(LayerRange(1, 2), rows, n)  # a residual of the right size, whatever the layer
        out = []
        for i in range(n):
            choice = self._stage.choice(rows[i * ROW_BYTES : (i + 1) * ROW_BYTES], 0, Sampling())
            logits = [0.0] * VOCABULARY
            logits[choice.argmax] = choice.logit
            out.append(struct.pack(f"<{VOCABULARY}f", *logits))
        return b"".join(out)

    async def aclose(self) -> None:
        self._closed = True
        self._waiting.clear()
        await trio.lowlevel.checkpoint()


def _nothing() -> None:
    """What is done already cannot be withdrawn."""
