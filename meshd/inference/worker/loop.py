"""The computing thread of an engine worker: take calls, decide a tick, compute it, answer.

Owns the runs in progress. The order is `inference/batch.py`'s, memory is `sessions.py`'s, arithmetic the stage's; this module
only joins them.

Invariants: every call gets exactly one answer on its stream, rows or an error. One bad run never hurts its company: when a
step over several sessions raises, each is computed again alone, and only those that raise again fail. A run that was withdrawn
is dropped at the next tick's border.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from meshd.errors import (
    BadTensor,
    Busy,
    ContextLengthExceeded,
    EngineFailed,
    MeshdError,
    NeedRows,
    PeerError,
    RangeNotHeld,
)
from meshd.inference import codec
from meshd.inference.batch import BLOCK_ROWS, Batcher, Limits, Slice, chunk_rows
from meshd.inference.engine import Choice, Ran, Run
from meshd.inference.gathering import Gathering
from meshd.inference.logits import most_rows
from meshd.inference.prefix_cache import PrefixCache, chain_of, usable_tokens
from meshd.inference.worker import pages
from meshd.inference.worker.link import Call, Withdrawn
from meshd.inference.worker.sampling import draw
from meshd.inference.worker.sessions import LastRow, Prompt, Sessions
from meshd.inference.worker.skeleton import DTYPES
from meshd.inference.worker.stage import Item, SessionState, Stage
from meshd.inference.worker.tensors import ids_untrusted, residual_untrusted, tensor_bytes
from meshd.inference.worker.vitals import Vitals
from meshd.links.fields import integer_untrusted, layers_untrusted
from meshd.links.wire import Message
from meshd.vocabulary import LayerRange

_IDLE_TURN_S = 0.25  # an idle loop turns this often, so that its tick moves
_NEWEST = 0.3  # how much the newest chunk says about this device's present speed
_MAX_STATELESS = 16
_MAX_STATELESS_ROWS = 8192


class Answers(Protocol):
    """Where calls come from and answers go: `WorkerLink`."""

    @property
    def waiting(self) -> int: ...
    def take(self, timeout_s: float) -> Sequence[Call | Withdrawn]: ...
    def reply(self, stream: int, message: Message | None = None) -> None: ...
    def fail(self, stream: int, error: Exception) -> None: ...


@dataclass(slots=True)
class _Running:
    """A run between its arrival and its answer."""

    run: Run
    rows: torch.Tensor
    arrived: float
    began: float | None = None
    emitted: list[torch.Tensor] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    compute_ms: float = 0.0
    batch: int = 1


class Loop:
    """One worker at work. ``clock`` is monotonic seconds, ``ms_64`` what 64 rows took when last measured."""

    def __init__(
        self,
        stage: Stage,
        answers: Answers,
        config: codec.WorkerConfig,
        vitals: Vitals,
        clock: Callable[[], float] = time.monotonic,
        *,
        ms_64: float = 0.0,
    ) -> None:
        self._stage = stage
        self._answers = answers
        self._context = config.context
        self._prefill_rows = config.prefill_rows
        self._ms_64 = ms_64
        self._vitals = vitals
        self._clock = clock
        self._ends = stage.num_layers
        self._dtype = DTYPES[stage.dtype]
        self._batcher: Batcher[int] = Batcher(
            Limits(max_batch=config.max_batch, prefill_rows=config.prefill_rows, max_queue=config.max_queue)
        )
        self._gathering = Gathering()
        self._most_bytes = 0  # of sessions, since memory was last given back
        self._runs: dict[int, _Running] = {}
        self._stateless: deque[Call] = deque()
        self._facts = (config.digest, stage.arith)
        # A state that is not plain keys and values cannot be copied up to a position.
        prefixes: PrefixCache[Prompt[SessionState]] = PrefixCache(
            config.prefix_bytes if stage.packs else 0, config.prefix_ttl_s
        )
        self._sessions: Sessions[SessionState] = Sessions(config.kv_budget_bytes, new=stage.state, prefixes=prefixes)

    def run_forever(self) -> None:
        """Until the daemon is gone (EOFError)."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what arrived, compute one tick, answer."""
        self._listen()
        self._sessions.expire(self._clock())
        self._vitals.begin()
        try:
            tokens = self._tick()
            if self._stateless:
                self._compute_stateless(self._stateless.popleft())
        finally:
            self._vitals.finish()
        self._report(tokens)

    def _listen(self) -> None:
        """Take what has arrived, and what is worth waiting for."""
        idle = not self._runs and not self._stateless
        arrivals = self._answers.take(_IDLE_TURN_S if idle else 0.0)
        if idle and not arrivals:
            self._rest()
        while True:
            for arrival in arrivals:
                if isinstance(arrival, Withdrawn):
                    self._withdraw(arrival.stream)
                else:
                    self._accept(arrival)
            wait_s = self._gathering.wait_s(self._clock(), self._batcher.decoding) if self._runs else 0.0
            arrivals = self._answers.take(wait_s) if wait_s > 0.0 else ()
            if not arrivals:
                return

    def _tick(self) -> int:
        """Compute what is due; how many rows of it were tokens of answers."""
        began, gathering = self._clock(), self._gathering
        waiting = self._batcher.decoding
        company = bool(waiting) or gathering.in_company(began)
        step_ms = gathering.step_s * 1e3 if company and gathering.step_s else None
        decoding = gathering.share(began, waiting)
        slices = self._batcher.take(chunk_rows(self._ms_64, self._prefill_rows, step_ms), decoding)
        if not slices:
            return 0
        short = self._batcher.limits.short_rows
        decoders = [self._runs[piece.tag].run.session for piece in slices if piece.n <= short and piece.last]
        tokens = self._compute(slices)
        now = self._clock()
        gathering.ticked(decoders, now, now - began, alone=len(decoders) == len(slices))
        return tokens

    def _rest(self) -> None:
        """Nobody asks for anything: return the memory of sessions that have gone."""
        used_bytes = self._sessions.used_bytes
        if used_bytes < self._most_bytes:
            pages.give_back()
        self._most_bytes = used_bytes

    def _report(self, tokens: int) -> None:
        vitals = self._vitals
        vitals.tick += 1
        vitals.queue = len(self._batcher) + len(self._stateless) + self._answers.waiting
        vitals.sessions = len(self._sessions)
        vitals.kv_used = self._sessions.used_bytes
        self._most_bytes = max(self._most_bytes, vitals.kv_used)
        vitals.kv_total = self._sessions.budget_bytes
        vitals.evicted = self._sessions.evicted
        vitals.generated(tokens)

    # --- what arrives -------------------------------------------------------------------------------------------------

    def _accept(self, call: Call) -> None:
        try:
            match call.message.kind:
                case codec.RUN:
                    self._accept_run(call)
                case codec.OPEN:
                    self._open(call)
                case codec.DROP:
                    self._drop(call)
                case codec.BOUNDARY:
                    self._boundary(call)
                case codec.EMBED | codec.FORWARD | codec.LM_HEAD:
                    if len(self._stateless) >= _MAX_STATELESS:
                        raise Busy(f"{_MAX_STATELESS} stateless calls wait already")
                    self._stateless.append(call)
                case kind:
                    raise PeerError(f"an engine worker does not know {kind!r}")
        except Exception as error:  # noqa: BLE001  # whatever one call does, the others go on
            self._fail(call.stream, error)

    def _accept_run(self, call: Call) -> None:
        run = codec.run_untrusted(call.message)
        self._check_held(run.layers)
        if self._context and run.start + run.n > self._context:
            raise ContextLengthExceeded(f"position {run.start + run.n} is past the model's context of {self._context}")
        if run.sampling is not None and run.layers.end != self._ends:
            raise BadTensor(f"tokens are drawn at the model's end, not after {run.layers}")
        rows = self._rows(run.layers, run.rows, run.n)
        if (known := self._known(run, rows)) is not None:
            running = self._runs[call.stream] = _Running(run, rows, call.arrived)
            self._put_out(running, known, run.start + 1)
            self._answer(call.stream, running)
            return
        self._batcher.offer(call.stream, run.session, start=run.start, n=run.n, emit=run.emit, size_bytes=len(run.rows))
        self._runs[call.stream] = _Running(run, rows, call.arrived)
        if run.n <= self._batcher.limits.short_rows:
            self._gathering.arrived(run.session, call.arrived)

    def _known(self, run: Run, rows: torch.Tensor) -> torch.Tensor | None:
        """What comes out of the row of ``run``, if it ends a prompt that was computed before and is the same, bit for bit."""
        last = self._sessions.recall(run.session, run.layers, run.start) if run.n == run.emit == 1 else None
        if last is None or last.drawn != (run.sampling is not None) or not torch.equal(last.row, rows):
            return None
        return last.output

    def _rows(self, layers: LayerRange, body: bytes, n: int) -> torch.Tensor:
        if layers.start == 0:
            return ids_untrusted(body, n, self._stage.vocab_size)
        return residual_untrusted(body, n, self._stage.hidden_size, self._dtype)

    def _check_held(self, layers: LayerRange) -> None:
        held = self._stage.layers
        if not held.covers(layers):
            raise RangeNotHeld(f"layers {layers} are not loaded, {held} are", held=held)

    def _open(self, call: Call) -> None:
        opening = codec.opening_untrusted(call.message)
        self._check_held(opening.layers)
        facts = (*self._facts, str(opening.layers), opening.tenant)
        have = self._sessions.begin(
            opening.session,
            opening.layers,
            chain_of(facts, opening.ids),
            most=usable_tokens(opening.ids),
            tokens=opening.reserve_tokens,
            now=self._clock(),
        )
        self._answers.reply(call.stream, Message(codec.OPEN, {"have": have}))

    def _drop(self, call: Call) -> None:
        session = codec.session_untrusted(call.message.head)
        for stream in self._batcher.of_session(session):
            self._fail(stream, NeedRows(0))
        self._sessions.drop(session)
        self._answers.reply(call.stream)

    def _boundary(self, call: Call) -> None:
        head = call.message.head
        layers = layers_untrusted(head)
        start = integer_untrusted(head, "start", 0, 1 << 31)
        end = integer_untrusted(head, "end", start, 1 << 31)
        found = self._sessions.get(codec.session_untrusted(head), layers)
        if found is None:
            raise NeedRows(0)
        rows = found.state.boundary(start, end)
        self._answers.reply(call.stream, Message(codec.ROWS, body=tensor_bytes(rows)))

    def _withdraw(self, stream: int) -> None:
        self._batcher.remove(stream)
        self._runs.pop(stream, None)
        self._stateless = deque(call for call in self._stateless if call.stream != stream)

    def _fail(self, stream: int, error: Exception) -> None:
        self._withdraw(stream)
        if isinstance(error, NeedRows):
            self._vitals.need_rows += 1
        elif isinstance(error, Busy):
            self._vitals.busy += 1
        else:
            self._vitals.failed += 1
        if not isinstance(error, MeshdError):
            traceback.print_exception(error, file=sys.stderr)
            error = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
        self._answers.fail(stream, error)

    # --- what is computed ---------------------------------------------------------------------------------------------

    def _compute(self, slices: list[Slice[int]]) -> int:
        """Compute one tick; how many rows of it were tokens of answers."""
        alike: dict[tuple[LayerRange, bool], list[Slice[int]]] = {}
        for piece in slices:
            run = self._runs[piece.tag].run
            alike.setdefault((run.layers, run.sampling is not None), []).append(piece)
        return sum(self._step(layers, draws, pieces) for (layers, draws), pieces in alike.items())

    def _step(self, layers: LayerRange, draws: bool, pieces: list[Slice[int]]) -> int:
        ready: list[tuple[Slice[int], Item]] = []
        for piece in pieces:
            try:
                ready.append((piece, self._item(piece)))
            except Exception as error:  # noqa: BLE001  # as in _accept
                self._fail(piece.tag, error)
        if not ready:
            return 0
        began = self._clock()
        try:
            outputs = self._stage.step(layers, [item for _, item in ready], logits=draws)
        except Exception as error:  # noqa: BLE001  # retried alone: the one that cannot be computed fails, nobody else
            if len(ready) == 1:
                self._fail(ready[0][0].tag, error)
                return 0
            traceback.print_exception(error, file=sys.stderr)
            return sum(self._step(layers, draws, [piece]) for piece, _ in ready)
        took_ms = (self._clock() - began) * 1e3
        rows = sum(item.n for _, item in ready)
        if rows >= BLOCK_ROWS:
            self._ms_64 += _NEWEST * (took_ms * 64 / rows - self._ms_64)
        tokens = 0
        for (piece, item), output in zip(ready, outputs, strict=True):
            tokens += max(0, item.start + item.n - max(item.start, item.prompt_len))
            try:
                self._emit(piece, output, began, took_ms, len(ready))
            except Exception as error:  # noqa: BLE001  # as in _accept
                self._fail(piece.tag, error)
        return tokens

    def _item(self, piece: Slice[int]) -> Item:
        running = self._runs[piece.tag]
        run = running.run
        start = run.start + piece.first
        # The whole rest is asked for: room is granted before the first chunk or not at all.
        session = self._sessions.open(
            run.session,
            run.layers,
            start=start,
            n=run.n - piece.first,
            prompt_len=run.prompt_len,
            reserve_tokens=run.reserve_tokens,
            now=self._clock(),
        )
        rows = running.rows[piece.first : piece.first + piece.n]
        return Item(session.state, start, piece.n, piece.emit, run.prompt_len, rows)

    def _emit(self, piece: Slice[int], output: torch.Tensor, began: float, took_ms: float, batch: int) -> None:
        running = self._runs[piece.tag]
        run = running.run
        self._sessions.touch(run.session, self._clock())
        self._vitals.rows += piece.n
        running.began = began if running.began is None else running.began
        running.compute_ms += took_ms
        running.batch = max(running.batch, batch)
        end = piece.first + piece.n
        if piece.emit:
            row = running.rows[end - 1 : end]
            self._sessions.remember(run.session, run.start + end - 1, lambda: _last_row(row, output[-1:], run))
            self._put_out(running, output, run.start + end)
        if piece.last:
            self._answer(piece.tag, running)

    def _put_out(self, running: _Running, output: torch.Tensor, end: int) -> None:
        """``output`` are the rows before position ``end``."""
        run = running.run
        if run.sampling is not None:
            history = (*run.history, *(choice.token for choice in running.choices))
            running.choices += draw(output, end - len(output) + 1, run.sampling, history)
        else:
            running.emitted.append(output)

    def _answer(self, stream: int, running: _Running) -> None:
        rows = b"".join(map(tensor_bytes, running.emitted))
        waited_ms = ((running.began or running.arrived) - running.arrived) * 1e3
        ran = Ran(rows, tuple(running.choices), running.compute_ms, waited_ms, running.batch)
        self._vitals.runs += 1
        del self._runs[stream]
        self._answers.reply(stream, codec.ran_message(ran))

    def _compute_stateless(self, call: Call) -> None:
        try:
            compute = {codec.EMBED: self._embed, codec.FORWARD: self._forward, codec.LM_HEAD: self._lm_head}
            rows = compute[call.message.kind](call.message)
            self._answers.reply(call.stream, Message(codec.ROWS, body=tensor_bytes(rows)))
        except Exception as error:  # noqa: BLE001  # as in _accept
            self._fail(call.stream, error)

    def _embed(self, message: Message) -> Any:
        n = integer_untrusted(message.head, "n", 1, self._context or _MAX_STATELESS_ROWS)
        return self._stage.embed(ids_untrusted(message.body, n, self._stage.vocab_size))

    def _forward(self, message: Message) -> Any:
        layers = layers_untrusted(message.head)
        n = integer_untrusted(message.head, "n", 1, self._context or _MAX_STATELESS_ROWS)
        self._check_held(layers)
        if message.head.get("embedded") is True:
            return self._stage.forward(
                layers, residual_untrusted(message.body, n, self._stage.hidden_size, self._dtype)
            )
        return self._stage.forward(layers, self._rows(layers, message.body, n))

    def _lm_head(self, message: Message) -> Any:
        if self._stage.layers.end != self._ends:
            raise RangeNotHeld("the model's head is not loaded here", held=self._stage.layers)
        n = integer_untrusted(message.head, "n", 1, most_rows(self._stage.vocab_size))
        return self._stage.lm_head(residual_untrusted(message.body, n, self._stage.hidden_size, self._dtype))


def _last_row(row: torch.Tensor, output: torch.Tensor, run: Run) -> LastRow:
    """Copied: both are parts of what a whole batch came in and went out with."""
    return LastRow(row.clone(), output.clone(), run.sampling is not None, row.nbytes + output.nbytes)
