"""A text side of bytes: ids 0..255 are UTF-8 bytes, 256 ends an answer, and it can be counted on to be exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EOS = 256
VOCAB = 257


class ByteText:
    def __init__(self) -> None:
        self.longest = 0  # the longest text that was to be encoded

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    async def encode(self, text: str, *, special: bool = False) -> list[int]:
        self.longest = max(self.longest, len(text))
        return list(text.encode())

    async def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return list(f"{text}assistant: ".encode())

    async def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    async def aclose(self) -> None: ...
