"""One session's share of a step: what the loop around a stage fills in and the stage computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshd.inference.worker.kv import SessionState


@dataclass(slots=True)
class Item:
    """Positions ``[start, start + n)`` of one session; the last ``emit`` rows come back.

    ``rows`` are int64 ids ``[n]`` where the step starts the model, else residuals ``[n, hidden]``. ``prompt_len`` fixes the
    arithmetic: positions below it are computed in blocks, the others row by row.
    """

    state: SessionState
    start: int
    n: int
    emit: int
    prompt_len: int
    rows: torch.Tensor
