"""Rotary frequencies of which a model has two sets: one for texts up to some length, another for longer ones (LongRoPE).

transformers takes the set by the longest position of a forward pass, which is the whole prompt there. Here a prompt comes in
chunks, and a replay has rows of prompt and answer in one, so every row is given the set that it had in that pass: by the length
of the prompt, or by its own position behind it. Then a row's frequencies depend on neither chunks nor replays.

An answer that grows over the limit has keys of the one set before it and of the other behind it, except in architectures that
begin anew at that place (Phi-3): there what a session has is forgotten, and comes again as after any loss.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.generation.utils import GenerationMixin

KIND: Final = "longrope"


class TwoRanges:
    """Stands before the rotary module of a decoder. ``reached`` is a length that every row of the next pass counts as having
    reached: its prompt's. ``limit`` is the longest text of the first set."""

    def __init__(self, rotary: Any, limit: int) -> None:
        self.limit: Final = limit
        self.reached = 0
        self._run = rotary.forward
        rotary.forward = self._forward

    @classmethod
    def of(cls, skeleton: Any) -> TwoRanges | None:
        """For a model that has two sets; it computes every row with its own from now on."""
        rope = getattr(skeleton.config, "rope_parameters", None) or {}
        rotary = getattr(skeleton.decoder, "rotary_emb", None)
        if rope.get("rope_type") != KIND or rotary is None:
            return None
        return cls(rotary, int(rope["original_max_position_embeddings"]))

    def _forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        beyond = (position_ids + 1).clamp_min(self.reached) > self.limit
        if not bool(beyond.any()):
            cos, sin = self._run(x, position_ids)
            return cos, sin
        # one position beyond the limit beside them makes it the second set for all
        mark = position_ids.new_full((len(position_ids), 1), self.limit)
        cos, sin = (part[:, :-1] for part in self._run(x, torch.cat([position_ids, mark], 1)))
        if bool(beyond.all()):
            return cos, sin
        short_cos, short_sin = self._run(x, position_ids.clamp_max(self.limit - 1))
        return torch.where(beyond[..., None], cos, short_cos), torch.where(beyond[..., None], sin, short_sin)


def begins_anew(model: Any) -> bool:
    """True for an architecture that computes a text again when it grows over the limit: it says so where it generates."""
    own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return own and hasattr(model.config, "original_max_position_embeddings")
