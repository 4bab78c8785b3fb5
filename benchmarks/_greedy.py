"""Driving an engine that holds the whole model, as an entry would, without anything in between."""

from __future__ import annotations

from collections.abc import Sequence

from meshd.chain.attempts import pack_ids
from meshd.inference.engine import Choice, Run, Sampling
from meshd.inference.worker_engine import WorkerEngine
from meshd.vocabulary import SessionId


async def step(
    engine: WorkerEngine,
    session: SessionId,
    ids: Sequence[int],
    start: int,
    *,
    prompt_len: int,
    reserve_tokens: int,
    emit: int = 1,
) -> tuple[Choice, ...]:
    """Positions ``[start, start + len(ids))``; the greedy choices after the last ``emit`` of them."""
    run = Run(
        session=session,
        layers=engine.info.layers,
        start=start,
        n=len(ids),
        emit=emit,
        prompt_len=prompt_len,
        rows=pack_ids(list(ids)),
        reserve_tokens=reserve_tokens,
        sampling=Sampling(),
    )
    return (await engine.run(run)).choices
