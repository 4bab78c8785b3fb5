"""How many rows of logits one answer of the tensor wire may hold: the API says so, and the worker holds to it.

Pure. A row of logits is up to a hundred times as wide as the residual it was made of, so a small request could otherwise ask for
more memory than a device has.
"""

from __future__ import annotations

from typing import Final

MAX_LOGITS_BYTES: Final = 32 << 20
_FLOAT_BYTES: Final = 4


def most_rows(vocab_size: int) -> int:
    """At least one, whatever the vocabulary."""
    return max(1, MAX_LOGITS_BYTES // (_FLOAT_BYTES * vocab_size))
