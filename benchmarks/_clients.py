"""Many streaming clients in one task tree, as cheap as clients can be: they share the machine with what they measure.

A client writes one ``POST /chain`` and notes when the bytes of each event came; tokens are read out of them after the answer's
end, so that no client's work delays another's clock. Errors: RuntimeError for an answer that is refused or breaks off.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from meshd.cli.local_room import Node

_EVENT = b'data: {"tokens"'
_PATIENCE_S = 240.0


@dataclass(slots=True)
class Streamed:
    """One answer as its client saw it: when it was asked for, its tokens, when each came (seconds), its last event."""

    began: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in itertools.pairwise(self.times)]

    @property
    def first_ms(self) -> float:
        return (self.times[0] - self.began) * 1e3


def random_ids(seed: object, count: int, vocab_size: int) -> list[int]:
    """A prompt that nobody has kept and no guess fits."""
    rng = random.Random(str(seed))
    return [rng.randrange(100, vocab_size) for _ in range(count)]


async def ask(node: Node, *, came: list[float] | None = None, **body: Any) -> Streamed:
    """One streamed answer. ``came`` gets the time of each event with tokens at once, for who cannot wait for the end."""
    answer, pieces = Streamed(time.perf_counter()), list[tuple[float, bytes]]()
    with trio.fail_after(_PATIENCE_S):
        async with await connect(node, **body) as stream:
            async for data in stream:
                pieces.append((time.perf_counter(), bytes(data)))
                if came is not None and _EVENT in data:
                    came.append(pieces[-1][0])
    if not pieces or b" 200 " not in pieces[0][1][:20]:
        raise RuntimeError(b"".join(data for _, data in pieces).decode(errors="replace")[-500:] or "no answer")
    _read(answer, pieces)
    if not answer.last:
        raise RuntimeError(f"an answer that broke off after {len(answer.tokens)} tokens")
    return answer


async def connect(node: Node, **body: Any) -> trio.SocketStream:
    """A connection on which a streamed answer was asked for."""
    host, _, port = node.http.rpartition(":")
    stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
    raw = json.dumps({"stream": True, "deadline_ms": int(_PATIENCE_S * 1e3), **body}).encode()
    head = f"POST /chain HTTP/1.1\r\nHost: {node.http}\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    await stream.send_all(head.encode() + raw)
    return stream


async def together(node: Node, bodies: Sequence[dict[str, Any]]) -> list[Streamed]:
    """All of them at once; answers in the same order."""
    answers: dict[int, Streamed] = {}

    async def one(number: int, body: dict[str, Any]) -> None:
        answers[number] = await ask(node, **body)

    async with trio.open_nursery() as nursery:
        for number, body in enumerate(bodies):
            nursery.start_soon(one, number, body)
    return [answers[number] for number in range(len(bodies))]


def rate(answers: Sequence[Streamed]) -> float:
    """Tokens a second of all of them while all of them decode: from the last one's first token to the first one's last."""
    start = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    count = sum(start < at <= end for answer in answers for at in answer.times)
    return count / (end - start) if end > start else 0.0


def _read(answer: Streamed, pieces: list[tuple[float, bytes]]) -> None:
    rest = b""
    for at, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_EVENT):
                tokens = json.loads(line[6:])["tokens"]
                answer.tokens += tokens
                answer.times += [at] * len(tokens)
            elif line.startswith(b'data: {"id"') and b'"finish_reason"' in line:
                answer.last = json.loads(line[6:])
