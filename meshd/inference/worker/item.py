"""One session's share of a step: what the loop around a stage fills in and the stage computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def split(self) -> tuple[Item | None, Item | None]:
        """What of it is prompt and what is answer; None for what is not there."""
        cut = min(max(self.prompt_len - self.start, 0), self.n)
        if cut in (0, self.n):
            return (self, None) if cut else (None, self)
        left = self.n - cut
        prompt = replace(self, n=cut, emit=max(0, self.emit - left), rows=self.rows[:cut])
        answer = replace(self, start=self.start + cut, n=left, emit=min(self.emit, left), rows=self.rows[cut:])
        return prompt, answer
