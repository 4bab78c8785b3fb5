"""The rehearsal model's text: one id per UTF-8 byte and a template that only writes roles and contents down.

Ids 0..255 are bytes in; the head emits 32..126, so whatever comes out is ASCII. No end token, no begin token, hence nothing
in a message can become a control token. Implements `meshd.inference.text.Text`. Errors: CallerError for messages that are
not a role and a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshd.errors import CallerError


class HashText:
    """Bytes as token ids."""

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset()

    async def encode(self, text: str, *, special: bool = False) -> list[int]:  # noqa: ARG002 - the contract's; there are none
        return list(text.encode())

    async def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        lines = []
        for index, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise CallerError(f"messages[{index}] needs a role and a content, both text", param="messages")
            lines.append(f"{role}: {content}\n")
        return list("".join([*lines, "assistant: "]).encode())

    async def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    async def aclose(self) -> None:
        """Nothing to stop."""
