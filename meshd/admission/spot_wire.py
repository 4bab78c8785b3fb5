"""A spot check on a link: rows in, rows out, without a session. Pure.

Owns the layout of the stream kind ``probe.rows``. Like a probe it names digest, layers and engine generation both ways, and is
bounded: at most `ROWS_CAP` rows. Functions ending in ``_untrusted`` raise only BadFrame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshd.errors import BadFrame
from meshd.links.fields import digest_untrusted, integer_untrusted, layers_untrusted
from meshd.links.wire import Message
from meshd.vocabulary import LayerRange

ROWS: Final = "probe.rows"
RAN: Final = "probe.ran"
ROWS_CAP: Final = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """``n`` rows of positions 0..n that enter (question) or left (answer) ``layers`` of one engine."""

    digest: str
    generation: int
    layers: LayerRange
    n: int
    rows: bytes

    def message(self, kind: str) -> Message:
        """As it travels."""
        head = {"digest": self.digest, "generation": self.generation, "layers": self.layers.json(), "n": self.n}
        return Message(kind, head, self.rows)


def rows_untrusted(message: Message, kind: str) -> Rows:
    """Read a question or an answer."""
    if message.kind != kind:
        raise BadFrame(f"{message.kind} where {kind} was due")
    digest = digest_untrusted(message.head)
    n = integer_untrusted(message.head, "n", 2, ROWS_CAP)
    if not message.body or len(message.body) % n:
        raise BadFrame(f"{len(message.body)} bytes are not {n} rows")
    generation = integer_untrusted(message.head, "generation", 0, 1 << 53)
    return Rows(digest, generation, layers_untrusted(message.head), n, message.body)
