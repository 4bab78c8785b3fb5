"""A probe on a link: one stream, one request with all prompts' rows, one answer.

Owns the layout of the stream kind ``probe``. Request and answer name digest, layers and engine generation, so that neither is
ever taken for another engine's. A probe is bounded: at most `PROMPTS_CAP` prompts of at most `TOKENS_CAP` rows. Functions ending
in ``_untrusted`` raise only BadFrame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshd.admission.qspec import COMPARED
from meshd.errors import BadFrame
from meshd.links.fields import digest_untrusted, integer_untrusted, layers_untrusted
from meshd.links.wire import Message
from meshd.vocabulary import LayerRange

PROBE: Final = "probe"
PROBED: Final = "probed"
PROMPTS_CAP: Final = 9
TOKENS_CAP: Final = 16
_ROW_CAP_BYTES: Final = 1 << 18
_GENERATION_CAP: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Prompts of ``lengths`` rows each, one after the other in ``rows``; the first one is for warming up."""

    digest: str
    generation: int
    layers: LayerRange
    lengths: tuple[int, ...]
    rows: bytes

    @property
    def row_bytes(self) -> int:
        return len(self.rows) // sum(self.lengths)

    def prompts(self) -> list[bytes]:
        """Each prompt's rows."""
        found, at = [], 0
        for length in self.lengths:
            found.append(self.rows[at : at + length * self.row_bytes])
            at += length * self.row_bytes
        return found


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The last four rows of each prompt but the first, and its greedy ids where the layers end the model."""

    digest: str
    generation: int
    layers: LayerRange
    rows: tuple[bytes, ...]
    greedy: tuple[tuple[int, ...], ...]


def request_message(request: ProbeRequest) -> Message:
    """The first message of the stream."""
    head = {**_subject(request), "lengths": list(request.lengths)}
    return Message(PROBE, head, request.rows)


def request_untrusted(message: Message) -> ProbeRequest:
    """Read a probe; whether its rows fit the model is the engine's to say."""
    lengths = message.head.get("lengths")
    if not isinstance(lengths, list) or not 2 <= len(lengths) <= PROMPTS_CAP:
        raise BadFrame("a probe without prompts")
    if not all(type(n) is int and COMPARED < n <= TOKENS_CAP for n in lengths):
        raise BadFrame(f"a probe's prompts have {COMPARED + 1} to {TOKENS_CAP} rows")
    total = sum(lengths)
    if not message.body or len(message.body) % total or len(message.body) > total * _ROW_CAP_BYTES:
        raise BadFrame(f"{len(message.body)} bytes are not {total} rows")
    digest, generation, layers = _subject_untrusted(message.head)
    return ProbeRequest(digest, generation, layers, tuple(lengths), message.body)


def answer_message(answer: ProbeAnswer) -> Message:
    """The only message that comes back."""
    head: dict[str, Any] = {**_subject(answer), "prompts": len(answer.rows)}
    if answer.greedy:
        head["greedy"] = [list(ids) for ids in answer.greedy]
    return Message(PROBED, head, b"".join(answer.rows))


def answer_untrusted(message: Message) -> ProbeAnswer:
    """Read the answer."""
    if message.kind != PROBED:
        raise BadFrame(f"{message.kind} where {PROBED} was due")
    count = integer_untrusted(message.head, "prompts", 1, PROMPTS_CAP)
    if not message.body or len(message.body) % (count * COMPARED):
        raise BadFrame(f"{len(message.body)} bytes are not the rows of {count} prompts")
    size = len(message.body) // count
    digest, generation, layers = _subject_untrusted(message.head)
    return ProbeAnswer(
        digest,
        generation,
        layers,
        tuple(message.body[i * size : (i + 1) * size] for i in range(count)),
        _greedy_untrusted(message.head.get("greedy"), count),
    )


def _greedy_untrusted(value: Any, count: int) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != count:
        raise BadFrame("greedy ids of another number of prompts")
    for ids in value:
        if (
            not isinstance(ids, list)
            or len(ids) != COMPARED
            or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
        ):
            raise BadFrame("greedy ids that are none")
    return tuple(tuple(ids) for ids in value)


def _subject(of: ProbeRequest | ProbeAnswer) -> dict[str, Any]:
    return {"digest": of.digest, "generation": of.generation, "layers": of.layers.json()}


def _subject_untrusted(head: Mapping[str, Any]) -> tuple[str, int, LayerRange]:
    return digest_untrusted(head), integer_untrusted(head, "generation", 0, _GENERATION_CAP), layers_untrusted(head)
