"""A node proves its engine to itself before it says that it holds anything.

Owns the step between "loaded" and "ready": the same probe that neighbours make, put to the engine in this process. A device whose
arithmetic or whose copy of the weights is broken finds out itself, and takes no traffic. Without a qspec, the node's own or a
neighbour's, there is nothing to compare with: the engine is used, neighbours judge it when they can, and the log says so.
Errors: EngineFailed saying what was wrong (the engine is closed then).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import trio

from meshd.admission.book import Subject
from meshd.admission.exam import sit
from meshd.admission.prober import Expectations, judged, request_for
from meshd.admission.qspec import sitting_s
from meshd.errors import EngineFailed, MeshdError
from meshd.inference.engine import Engine
from meshd.inference.keeper import Loader
from meshd.vocabulary import LayerRange, NodeId

EXPECTATION_S: Final = 15.0  # a qspec may have to come from a neighbour
ANSWER_S: Final = 60.0  # beyond what the engine measured of itself


class ProvingLoader:
    """A `Loader` whose engines have passed a probe. ``enabled`` False (``--no-admit``): they are taken as loaded."""

    def __init__(
        self,
        load: Loader,
        node_id: NodeId,
        expectations: Expectations,
        *,
        enabled: bool,
        rng: Random,
        log: Callable[[str], None],
    ) -> None:
        self._load = load
        self._node_id = node_id
        self._expectations = expectations
        self._enabled = enabled
        self._rng = rng
        self._log = log

    async def __call__(self, layers: LayerRange, generation: int, progress: Callable[[str, float], None]) -> Engine:
        engine = await self._load(layers, generation, progress)
        if not self._enabled:
            return engine
        progress("proving", 0.0)
        try:
            await self._prove(engine)
        except BaseException:
            with trio.CancelScope(shield=True):
                await engine.aclose()
            raise
        progress("proving", 1.0)
        return engine

    async def _prove(self, engine: Engine) -> None:
        info = engine.info
        try:
            with trio.fail_after(EXPECTATION_S):
                expected = await self._expectations(info.spec.digest)
        except (MeshdError, trio.TooSlowError) as error:
            why = error.message if isinstance(error, MeshdError) else "no neighbour answered in time"
            self._log(f"layers {info.layers} are not proven: {why}")
            return
        cases = await trio.to_thread.run_sync(expected.cases, info.layers, info.dtype, self._rng)
        subject = Subject(self._node_id, 0, info.generation, info.layers, info.spec.digest)
        limit_s = ANSWER_S + sitting_s(info.layers, info.layer_ms_64)
        try:
            with trio.fail_after(limit_s):
                answer = await sit(engine, request_for(subject, cases))
        except trio.TooSlowError:
            raise EngineFailed(
                f"layers {info.layers} did not answer this node's own probe in {limit_s:.0f} s"
            ) from None
        judgement = await trio.to_thread.run_sync(judged, answer, cases, expected, info.dtype)
        if not judgement.passed:
            raise EngineFailed(f"this node computes layers {info.layers} wrongly: {judgement.reason}")
