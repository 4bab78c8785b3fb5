"""Sitting a probe: how a stage runs the prompts it is given, whoever asks.

Owns the order of runs. The first prompt warms up, in two sessions: it leaves its keys and values behind. One of them is dropped.
Then the others run side by side, as real sessions do: one *in* the session that is left, from position 0, each of the rest in a
new one. So whatever a stage keeps of an earlier session shows in one of them. Each prompt is a prefill of all but three rows and
three cached steps. Where the layers end the model, the last four positions are run once more, drawn greedily; layers with a
state that cannot be cut back (convolutions, linear attention) then get the positions before them again.

Errors: whatever the engine raises; Conflict when it is another engine than the request names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import Final

import trio

from meshd.admission.probe_wire import ProbeAnswer, ProbeRequest
from meshd.admission.qspec import COMPARED, STEPS, ProbeStep, probe_steps
from meshd.admission.spot_wire import Rows
from meshd.errors import Conflict, MeshdError, NeedRows
from meshd.inference.engine import Engine, Run, Sampling
from meshd.vocabulary import SessionId

_numbers: Final = count()

Outcome = tuple[bytes, tuple[int, ...]]


async def sit(engine: Engine, request: ProbeRequest) -> ProbeAnswer:
    """Run a probe on this node's own engine."""
    check(engine, request)
    paper = _Paper(engine, request)
    warm, *prompts = request.prompts()
    used, left = paper.session(), paper.session()
    try:
        await paper.side_by_side([partial(paper.warm, used, warm), partial(paper.warm, left, warm)])
        engine.drop(left)
        sessions = [used, *(paper.session() for _ in prompts[1:])]
        outcomes = await paper.side_by_side(
            [partial(paper.prompt, session, rows) for session, rows in zip(sessions, prompts, strict=True)]
        )
    finally:
        paper.clear()
    check(engine, request)
    return ProbeAnswer(
        request.digest,
        request.generation,
        request.layers,
        tuple(rows for rows, _ in outcomes),
        tuple(ids for _, ids in outcomes) if paper.ends else (),
    )


def check(engine: Engine, request: ProbeRequest | Rows) -> None:
    """Raise Conflict unless ``request`` is about this engine."""
    info = engine.info
    if info.generation != request.generation:
        raise Conflict(f"this engine is number {info.generation}, not {request.generation}")
    if info.spec.digest != request.digest:
        raise Conflict(f"this node serves {info.spec.digest[:16]}, not {request.digest[:16]}")


class _Paper:
    """The sessions of one probe."""

    def __init__(self, engine: Engine, request: ProbeRequest) -> None:
        self._engine = engine
        self._layers = request.layers
        self._row_bytes = request.row_bytes
        self._name = f"probe-{next(_numbers)}"
        self._sessions: list[SessionId] = []
        self.ends = request.layers.end == engine.info.spec.num_layers

    def session(self) -> SessionId:
        """A session that was never there."""
        self._sessions.append(SessionId(f"{self._name}-{len(self._sessions)}"))
        return self._sessions[-1]

    def clear(self) -> None:
        """Leave nothing behind."""
        for session in self._sessions:
            self._engine.drop(session)

    async def prompt(self, session: SessionId, rows: bytes) -> Outcome:
        """The last four rows, and the greedy ids after them at the model's end."""
        n = len(rows) // self._row_bytes
        out = b"".join([await self.run(session, rows, step) for step in probe_steps(n)])
        return out, await self._greedy(session, rows, n) if self.ends else ()

    async def warm(self, session: SessionId, rows: bytes) -> Outcome:
        """A whole prefill that nobody looks at."""
        return await self.run(session, rows, ProbeStep(0, len(rows) // self._row_bytes, 0)), ()

    async def side_by_side(self, works: Sequence[Callable[[], Awaitable[Outcome]]]) -> list[Outcome]:
        """All at once; their outcomes in order. Raises the first error of any."""
        found: dict[int, Outcome] = {}
        errors: list[MeshdError] = []

        async def one(number: int, work: Callable[[], Awaitable[Outcome]]) -> None:
            try:
                found[number] = await work()
            except MeshdError as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for number, work in enumerate(works):
                nursery.start_soon(one, number, work)
        if errors:
            raise errors[0]
        return [found[number] for number in range(len(works))]

    async def run(self, session: SessionId, rows: bytes, step: ProbeStep) -> bytes:
        """A step of a prompt's rows; the residuals it emits."""
        return (await self._engine.run(self._step(session, rows, step))).rows

    async def _greedy(self, session: SessionId, rows: bytes, n: int) -> tuple[int, ...]:
        start = n - COMPARED
        try:
            ran = await self._engine.run(self._step(session, rows, ProbeStep(start, COMPARED, COMPARED), Sampling()))
        except NeedRows as short:  # a state that cannot be cut back: what it lacks goes in again
            start = min(start, short.have)
            ran = await self._engine.run(self._step(session, rows, ProbeStep(start, n - start, COMPARED), Sampling()))
        return tuple(choice.argmax for choice in ran.choices)

    def _step(self, session: SessionId, rows: bytes, step: ProbeStep, sampling: Sampling | None = None) -> Run:
        total = len(rows) // self._row_bytes
        return Run(
            session=session,
            layers=self._layers,
            start=step.start,
            n=step.n,
            emit=step.emit,
            prompt_len=total - STEPS,
            rows=rows[step.start * self._row_bytes : (step.start + step.n) * self._row_bytes],
            reserve_tokens=total,
            sampling=sampling,
        )
