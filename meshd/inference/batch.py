"""What an engine computes next: continuous batching as a pure scheduler.

Owns the queue of runs and the order in which their rows are computed. It knows neither tensors nor sessions' state, no clock
and no thread: `Batcher.take` returns the slices of one tick and regards them as computed.

Rules, and why:

* Everything short that waits (decode steps, draft windows, tails of prompts) runs together in one tick: a step over eight
  sessions costs little more than a step over one.
* Long runs (prompts, replays) are cut into chunks and share a budget of rows per tick, so a decoder waits for at most one
  chunk, and for a smaller one the faster it would be without. They get that budget in *every* tick, so decoders never starve
  them either.
* Within each kind the session served longest ago goes first.
* Runs of one session keep their order, one slice of one run per tick. A newer run does not overtake an older one: each
  truncates its session at its own start, so doing both is correct.

Invariants: at most ``max_batch`` slices a tick; at most ``prefill_rows`` rows in chunks of long runs; the slices of a run are
contiguous, in order, and end with its last row. Units: rows (one position of one session), bytes. Errors: `Busy` from `offer`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from meshd.errors import Busy

Tag = TypeVar("Tag", bound=Hashable)

BLOCK_ROWS: Final = 32
# Half of that makes a slow device read all weights twice as often: 1.5 times the work (measured).
STALL_MS: Final = 500.0
COMPANY_STEPS: Final = 1.5


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one tick may take and how much may wait."""

    max_batch: int = 32
    short_rows: int = 16  # a run with no more rows left than this is a decode step
    prefill_rows: int = 128  # measured best chunk of a pipeline of three: 128 to 256 rows
    block_rows: int = BLOCK_ROWS  # chunks end on this grid where they can: a block that is cut is computed twice
    max_queue: int = 256
    max_queue_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.max_batch < 2 or self.prefill_rows < 1:
            raise ValueError("a tick needs room for a decode step and a chunk")


def chunk_rows(measured_ms_64: float, most: int, step_ms: float | None = None) -> int:
    """How many rows of long runs a tick may take so that whoever comes meanwhile waits for about `STALL_MS`: on a slow device
    fewer than ``most``. ``measured_ms_64`` is what 64 rows take through all layers held; ``step_ms`` what a decode step takes,
    while somebody decodes: then a chunk takes no longer than `COMPANY_STEPS` of them."""
    within_ms = STALL_MS if step_ms is None else min(STALL_MS, COMPANY_STEPS * step_ms)
    affordable = int(64 * within_ms / max(measured_ms_64, 1e-3))
    return min(most, max(BLOCK_ROWS, affordable - affordable % BLOCK_ROWS))


@dataclass(frozen=True, slots=True)
class Slice(Generic[Tag]):
    """Rows ``[first, first + n)`` of the run ``tag``, of which the last ``emit`` are wanted."""

    tag: Tag
    first: int
    n: int
    emit: int
    last: bool


@dataclass(slots=True)
class _Waiting(Generic[Tag]):
    tag: Tag
    start: int
    n: int
    emit: int
    size_bytes: int
    done: int = 0

    @property
    def left(self) -> int:
        return self.n - self.done


@dataclass(slots=True)
class Batcher(Generic[Tag]):
    """The queue. ``tag`` names a run; ``session`` is whatever orders runs."""

    limits: Limits = field(default_factory=Limits)
    # Sessions with work, the one served longest ago first.
    _sessions: OrderedDict[Hashable, deque[_Waiting[Tag]]] = field(default_factory=OrderedDict)
    _owner: dict[Tag, Hashable] = field(default_factory=dict)
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._owner)

    def offer(self, tag: Tag, session: Hashable, *, start: int, n: int, emit: int, size_bytes: int = 0) -> None:
        """Queue a run of ``n`` rows that begins at position ``start`` (0 rows: only its turn). Raises Busy when full."""
        if tag in self._owner:
            raise ValueError(f"{tag!r} is queued already")
        if not 0 <= emit <= n:
            raise ValueError(f"cannot emit {emit} of {n} rows")
        if len(self._owner) >= self.limits.max_queue:
            raise Busy(f"{len(self._owner)} runs wait for this stage already")
        if self._owner and self._bytes + size_bytes > self.limits.max_queue_bytes:
            raise Busy(f"{self._bytes >> 20} MB of rows wait for this stage already")
        self._owner[tag] = session
        self._bytes += size_bytes
        self._sessions.setdefault(session, deque()).append(_Waiting(tag, start, n, emit, size_bytes))

    def remove(self, tag: Tag) -> bool:
        """Forget a run (cancelled, or failed in a slice). False when it is not queued."""
        if tag not in self._owner:
            return False
        session = self._owner.pop(tag)
        runs = self._sessions[session]
        gone = next(run for run in runs if run.tag == tag)
        runs.remove(gone)
        self._bytes -= gone.size_bytes
        if not runs:
            del self._sessions[session]
        return True

    @property
    def decoding(self) -> int:
        """How many sessions' next run is short."""
        return sum(runs[0].left <= self.limits.short_rows for runs in self._sessions.values())

    def of_session(self, session: Hashable) -> list[Tag]:
        """The queued runs of a session, in order."""
        return [run.tag for run in self._sessions.get(session, ())]

    def take(self, prefill_rows: int | None = None, decoding: int | None = None) -> list[Slice[Tag]]:
        """The slices of the next tick: short runs first, then chunks of long ones. Empty when nothing waits.
        ``prefill_rows`` and ``decoding`` (short runs) lower the limits for this tick."""
        most = self.limits.prefill_rows if prefill_rows is None else min(prefill_rows, self.limits.prefill_rows)
        heads = [(session, runs[0]) for session, runs in self._sessions.items()]
        short = [(session, run) for session, run in heads if run.left <= self.limits.short_rows]
        long = [(session, run) for session, run in heads if run.left > self.limits.short_rows]
        # One place is kept for a chunk, else a full house of decoders would starve every prompt.
        places = self.limits.max_batch - (1 if long else 0)
        if decoding is not None:
            places = min(places, decoding)
        slices = [self._advance(session, run, run.left) for session, run in short[:places]]
        budget = most
        for session, run in long[: self.limits.max_batch - len(slices)]:
            rows = self._chunk(run, budget, whole=budget == most)
            if rows == 0:
                break
            slices.append(self._advance(session, run, rows))
            budget -= rows
        return slices

    def _chunk(self, run: _Waiting[Tag], budget: int, *, whole: bool) -> int:
        rows = min(run.left, budget)
        if rows == run.left:
            return rows
        end = run.start + run.done + rows
        on_grid = rows - end % self.limits.block_rows
        # Off the grid only when that is all the budget allows and nobody else used it: a rest of a budget that does not
        # reach the next block is left unspent.
        return on_grid if on_grid > 0 else (rows if whole else 0)

    def _advance(self, session: Hashable, run: _Waiting[Tag], rows: int) -> Slice[Tag]:
        first = run.done
        run.done += rows
        wanted_from = run.n - run.emit
        emit = max(0, run.done - max(wanted_from, first))
        self._sessions.move_to_end(session)
        if run.left == 0:
            self.remove(run.tag)
        return Slice(run.tag, first, rows, emit, last=run.left == 0)
