"""A torch stage as an `Engine` in this process, and the same stage computing wrongly in the ways that stages do.

Faults are made from outside, by the ranges and positions that are run, so the stage itself is the real one: ``skip``, ``double``
and ``swap`` of layer ``at``; ``shift``: cached steps run one position too far; ``stale``: a session finds another one's
keys and values; ``noise``: the weights of layer ``at`` are another revision's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trio

from meshd.errors import NeedRows
from meshd.inference.engine import EngineHealth, EngineInfo, Opening, Ran, Run
from meshd.inference.worker.sampling import draw
from meshd.inference.worker.skeleton import DTYPES
from meshd.inference.worker.stage import Item, SessionState, Stage
from meshd.inference.worker.tensors import ids_untrusted, residual_untrusted, tensor_bytes
from meshd.vocabulary import LayerRange, ModelSpec, SessionId


class StageEngine:
    """``layers`` of a stage, honest unless ``fault`` says otherwise."""

    def __init__(self, stage: Stage, spec: ModelSpec, layers: LayerRange, *, fault: str = "", at: int = 0) -> None:
        self._stage, self._layers, self._fault, self._at = stage, layers, fault, at
        self._sessions: dict[SessionId, list[SessionState]] = {}
        self._order = list(_order(layers, fault, at))
        self._left: list[SessionState] | None = None
        self.info = EngineInfo(spec, layers, stage.dtype, stage.arith, stage.deterministic, generation=1)

    def health(self) -> EngineHealth:
        return EngineHealth(sessions=len(self._sessions))

    async def run(self, run: Run) -> Ran:
        await trio.lowlevel.checkpoint()
        states = self._sessions.get(run.session)
        if states is None or (run.start == 0 and self._fault != "stale"):
            stale = self._left if self._fault == "stale" else None
            states = self._sessions[run.session] = stale or [self._stage.state(part) for part in self._order]
        self._left = states
        start = run.start
        if self._fault == "stale":
            start = states[0].have
        elif self._fault == "shift" and run.start:
            start += 1
        if states[0].have < run.start:
            raise NeedRows(states[0].have)
        out = self._through(run, states, start)
        if run.sampling is not None:
            logits = self._stage.lm_head(out[len(out) - run.emit :])
            return Ran(choices=tuple(draw(logits, run.start + run.n - run.emit + 1, run.sampling, ())))
        return Ran(rows=tensor_bytes(out[len(out) - run.emit :]) if run.emit else b"")

    def _through(self, run: Run, states: list[SessionState], start: int) -> torch.Tensor:
        rows: Any = (
            ids_untrusted(run.rows, run.n, self._stage.vocab_size)
            if run.layers.start == 0
            else residual_untrusted(run.rows, run.n, self._stage.hidden_size, DTYPES[self._stage.dtype])
        )
        if run.layers.start == 0 and self._order[0].start != 0:
            rows = self._stage.embed(rows)
        for part, state in zip(self._order, states, strict=True):
            state.have = max(state.have, start)  # a slot whose last row is junk
            (rows,) = self._stage.step(part, [Item(state, start, run.n, run.n, run.prompt_len, rows)], logits=False)
        return rows

    async def open(self, opening: Opening) -> int:
        return 0

    def drop(self, session: SessionId) -> None:
        self._sessions.pop(session, None)

    async def boundary(self, session: SessionId, layers: LayerRange, start: int, end: int) -> bytes:
        raise NeedRows(0)

    async def forward(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        raise NotImplementedError

    async def lm_head(self, rows: bytes, n: int) -> bytes:
        raise NotImplementedError

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


def _order(layers: LayerRange, fault: str, at: int) -> list[LayerRange]:
    """The runs of layers in the order in which a stage with this fault takes them."""
    before = [LayerRange(layers.start, at)] if at > layers.start else []
    one, two = LayerRange(at, at + 1), LayerRange(at + 1, at + 2)
    after = [LayerRange(at + 1, layers.end)] if at + 1 < layers.end else []
    if fault == "skip":
        return [*before, *after]
    if fault == "double":
        return [*before, one, one, *after]
    if fault == "swap":
        return [*before, two, one, *([LayerRange(at + 2, layers.end)] if at + 2 < layers.end else [])]
    return [layers]


def stage_of(folder: Path, dtype: str = "auto", *, threads: int = 2, prepack: str = "off", **more: Any) -> Stage:
    """A stage of the whole model, or of ``layers``."""
    layers = more.pop("layers", None) or LayerRange(0, 30)
    return Stage(folder, layers, dtype=dtype, threads=threads, prepack=prepack, **more)


def spoil(stage: Stage, at: int, share: float, seed: int = 1) -> None:
    """Make layer ``at`` another revision's: each weight moved by ``share`` of its tensor's spread."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in stage._skeleton.layers[at - stage.layers.start].parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std() * share
        parameter.data = (parameter.detach().float() + noise).to(parameter.dtype)
