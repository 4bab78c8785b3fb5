"""What turns text into token ids and back: the contract of the text worker and of the hash model's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Text(Protocol):
    """A tokenizer and a chat template. Calls may raise CallerError (bad messages) or EngineFailed (the worker died)."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer: the config's, the generation config's and the tokenizer's own."""
        ...

    async def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of raw text, with the begin token where the tokenizer adds one. ``special`` False: text never becomes
        a control token."""
        ...

    async def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of messages through the template, message text never becoming control tokens."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out; an incomplete character at the end is U+FFFD."""
        ...

    async def aclose(self) -> None: ...
