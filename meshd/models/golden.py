"""The golden prompts: short runs of token ids that every device derives alike from the model's vocabulary alone.

No tokenizer is asked, so a device without one derives them too. Ids come from the middle of the vocabulary: the beginning holds
control tokens in most models, and the end holds added ones and padding rows that were never trained. Ids with a meaning of their
own (end, begin, added tokens) are left out wherever they lie. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from typing import Final

PROMPTS: Final = 12
SHORTEST_TOKENS: Final = 9
LONGEST_TOKENS: Final = 16
_SEED: Final = "meshd golden prompts 1"


def golden_prompts(vocab_size: int, avoid: Container[int]) -> tuple[tuple[int, ...], ...]:
    """The ids of every prompt; lengths differ, so that prefills of odd and even length are both tried."""
    low, high = vocab_size // 64, max(vocab_size // 2, 1)
    usable = [token for token in range(low, high) if token not in avoid] or list(range(vocab_size))
    spread = LONGEST_TOKENS - SHORTEST_TOKENS + 1
    return tuple(
        tuple(usable[_draw(prompt, place, len(usable))] for place in range(SHORTEST_TOKENS + prompt % spread))
        for prompt in range(PROMPTS)
    )


def _draw(prompt: int, place: int, below: int) -> int:
    drawn = hashlib.sha256(f"{_SEED} {prompt} {place}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") % below
