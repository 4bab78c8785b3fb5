"""A model cut into stages, driven as a chain of hops would drive them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from meshd.inference.worker.kv import SessionState
from meshd.inference.worker.stage import Item, Stage
from meshd.vocabulary import LayerRange


@dataclass
class Session:
    """One session's states, a state per stage."""

    states: list[SessionState]
    prompt_len: int


@dataclass
class Share:
    """What one session does in a step: ids at a position."""

    session: Session
    start: int
    ids: torch.Tensor


class Chain:
    """Stages that meet end to end; ``ranges`` may be narrower than what each stage holds."""

    def __init__(self, stages: Sequence[Stage], ranges: Sequence[LayerRange] | None = None) -> None:
        self.stages = list(stages)
        self.ranges = list(ranges or [stage.layers for stage in stages])

    @classmethod
    def cut(cls, folder: Path, cuts: Sequence[int], **options: Any) -> Chain:
        ranges = [LayerRange(a, b) for a, b in pairwise(cuts)]
        return cls([Stage(folder, layers, **options) for layers in ranges])

    def session(self, prompt_len: int) -> Session:
        pairs = zip(self.stages, self.ranges, strict=True)
        return Session([stage.state(layers) for stage, layers in pairs], prompt_len)

    def step(self, *shares: Share) -> list[torch.Tensor]:
        """Logits of every row of every share."""
        rows = [share.ids for share in shares]
        for i, (stage, layers) in enumerate(zip(self.stages, self.ranges, strict=True)):
            items = [
                Item(s.session.states[i], s.start, len(s.ids), len(s.ids), s.session.prompt_len, x)
                for s, x in zip(shares, rows, strict=True)
            ]
            rows = stage.step(layers, items)
        return rows

    def walk(self, session: Session, ids: torch.Tensor, sizes: Sequence[int], start: int = 0) -> torch.Tensor:
        """``ids`` in steps of ``sizes``: logits of every row."""
        parts = []
        for size in sizes:
            parts += self.step(Share(session, start, ids[start : start + size]))
            start += size
        return torch.cat(parts)


def some_ids(n: int, vocabulary: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, vocabulary, (n,), generator=torch.Generator().manual_seed(seed))


def whole(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The uncut model's logits of every position."""
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0].float()
