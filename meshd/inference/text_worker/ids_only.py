"""A model whose folder has no tokenizer: token ids go in and come out, and there is no text.

Checkpoints without ``tokenizer.json`` are made for tests, or keep their vocabulary in a file that only their own code reads. They
are served all the same to callers that send ``tokens``. Errors: CallerError for text, naming the cure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshd.errors import CallerError
from meshd.inference.text_worker.tokenizer import TextModel, config_end_ids

TOKENIZER_FILE = "tokenizer.json"


class IdsOnly:
    """`TextModel` without text."""

    def __init__(self, folder: Path) -> None:
        self.eos_ids = frozenset(config_end_ids(folder))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        del text, special
        raise _no_text("prompt")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        del messages
        raise _no_text("messages")

    def decode(self, ids: Sequence[int]) -> str:
        del ids
        return ""

    def find_turn_end(self) -> frozenset[int]:
        return self.eos_ids


def open_text(folder: Path) -> TextModel | IdsOnly:
    """The folder's text side. Raises ModelRefused for a tokenizer that is damaged."""
    return TextModel(folder) if (folder / TOKENIZER_FILE).exists() else IdsOnly(folder)


def _no_text(param: str) -> CallerError:
    return CallerError(
        f"this model came without {TOKENIZER_FILE}, so it cannot read text: send token ids (tokens), or add the file"
        " and pull it again",
        param=param,
    )
