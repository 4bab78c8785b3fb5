"""A conversation: what was said by whom. Pure.

A turn enters its question at once and the answer when it is over, as far as it came: who stops an answer goes on from there.
"""

from __future__ import annotations

from collections.abc import MutableSequence

from meshd.client.answer import Piece

Message = dict[str, str]


class Turn:
    """``messages`` belongs to the caller and may begin with a system message."""

    def __init__(self, messages: MutableSequence[Message], said: str) -> None:
        self._messages, self._heard = messages, list[str]()
        messages.append({"role": "user", "content": said})

    def heard(self, piece: Piece) -> None:
        self._heard.append(piece.text)

    def over(self) -> None:
        self._messages.append({"role": "assistant", "content": "".join(self._heard)})
