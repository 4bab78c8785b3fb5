"""``meshd bench``: what a room does for its clients, measured from outside.

Rows are labelled cold (the first request of a prompt) or warm, with model, dtype, nodes, route and the power state of the room
(on mains, on battery, mixed, or unknown where no device knows: laptops slow down on battery, and a figure without that is half
a figure). Rows with several clients are compared with one client under the same clock.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from meshd.cli.ask import MAX_TOKENS
from meshd.cli.room import Json, Url, connect, console, everybody
from meshd.client import Client
from meshd.errors import LocalError, MeshdError, UsageError

# Text to go on with: to a question without a chat template a model may say nothing (SmolLM2 ends half of such answers at once).
PROMPT = "Story number {n}.\n\nOnce upon a time, there was a lighthouse keeper who"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds to the first token and in all, tokens, and who computed them."""

    first_s: float
    total_s: float
    tokens: int
    route: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of some clients' requests in ``wall_s``. ``failures``: what those that failed were told."""

    samples: Sequence[Sample]
    failures: Sequence[str]
    wall_s: float

    @property
    def failed(self) -> int:
        return len(self.failures)

    @property
    def tokens_per_s(self) -> float:
        return sum(sample.tokens for sample in self.samples) / self.wall_s if self.wall_s else 0.0


def bench(
    url: Url = None,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Clients at once, such as 1,2,4,8.")] = "1,2,4,8",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of each client.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, max=MAX_TOKENS, help="Tokens of each answer.")] = 64,
    as_json: Json = False,
) -> None:
    """Cold and warm latency, first token, tokens/s alone and together, and the speed-up of many clients over one."""
    levels = _levels(concurrency)
    with connect(url) as room:
        label = label_of(room.get("/mesh/peers"), room.get("/mesh/hive"))
        first = random.SystemRandom().randrange(1 << 20)  # not the prompts of an earlier run, which the room may know
        cold = _ask(room, first, max_tokens)
    alone = _together(url, first, 1, requests, max_tokens)
    rows = [
        _row(label, "cold", 1, Measured([cold], [], cold.total_s)),
        {**_row(label, "warm", 1, alone), "failed": alone.failed},
    ]
    failures = list(alone.failures)
    for clients in levels:
        several = alone if clients == 1 else _together(url, first + 1, clients, requests, max_tokens)
        speed_up = round(several.tokens_per_s / alone.tokens_per_s, 2) if alone.tokens_per_s else None
        failures += several.failures if several is not alone else ()
        rows.append({**_row(label, "warm", clients, several), "failed": several.failed, "speed_up": speed_up})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _draw(label, rows)
    if failures:
        raise LocalError(f"{len(failures)} requests failed, the first with: {failures[0]}")


def label_of(peers: Mapping[str, Any], hive: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured: model, dtype, nodes and the power state."""
    nodes = everybody(peers)
    mains = [peer["status"].get("on_ac") for peer in nodes if peer["state"] == "alive" and peer.get("status")]
    known = {value for value in mains if value is not None}
    power = "mixed" if len(known) > 1 else "battery" if known == {False} else "mains" if known else "unknown"
    dtypes = sorted({peer["dtype"] for peer in nodes if peer["layers"] and peer["dtype"]})
    return {"model": hive["model"], "dtype": "+".join(dtypes), "nodes": hive["nodes"], "power": power}


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        levels = []
    if not levels or not all(1 <= level <= 256 for level in levels):
        raise UsageError(f"--concurrency: {text!r} is not a list of numbers from 1 to 256")
    return levels


def _ask(room: Client, number: int, max_tokens: int) -> Sample:
    began = time.monotonic()
    first_s, final = 0.0, None
    for piece in room.stream(PROMPT.format(n=number), max_tokens=max_tokens):
        if piece.tokens and not first_s:
            first_s = time.monotonic() - began
        final = piece.final or final
    route = "->".join(f"{hop['name']}[{hop['layers'][0]}:{hop['layers'][1]}]" for hop in (final or {}).get("route", ()))
    return Sample(first_s, time.monotonic() - began, len((final or {}).get("tokens", ())), route)


def _together(urls: Sequence[str] | None, first: int, clients: int, requests: int, max_tokens: int) -> Measured:
    """So many clients at once, each with a prompt of its own that the room knows already.

    The clock runs from the moment when all of them are ready to the last answer: making a client takes as long as a short
    answer, and one client alone would seem slower than it is."""
    began: list[float] = []
    samples: list[Sample] = []
    failures: list[str] = []
    ready = threading.Barrier(clients, action=lambda: began.append(time.monotonic()))

    def client(room: Client, number: int) -> None:
        try:
            with suppress(MeshdError):  # what is wrong will be said of the requests that count
                _ask(room, number, 1)
        finally:
            ready.wait()
        for _ in range(requests):
            try:
                samples.append(_ask(room, number, max_tokens))
            except MeshdError as error:
                failures.append(error.message)

    with ExitStack() as held, ThreadPoolExecutor(clients) as pool:
        rooms = [held.enter_context(connect(urls)) for _ in range(clients)]
        for done in [pool.submit(client, room, first + i) for i, room in enumerate(rooms)]:
            done.result()
    return Measured(samples, failures, time.monotonic() - began[0])


def _row(label: Mapping[str, Any], kind: str, clients: int, measured: Measured) -> dict[str, Any]:
    samples = measured.samples
    return {
        **label,
        "kind": kind,
        "clients": clients,
        "requests": len(samples),
        "first_token_ms": round(1e3 * statistics.median([s.first_s for s in samples]), 1) if samples else None,
        "answer_tokens": statistics.median([s.tokens for s in samples]) if samples else None,
        "latency_ms": round(1e3 * statistics.median([s.total_s for s in samples]), 1) if samples else None,
        "tokens_per_s": round(measured.tokens_per_s, 2),
        "route": max({s.route for s in samples}, key=[s.route for s in samples].count) if samples else "",
    }


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value} ms"


def _draw(label: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, title=", ".join(f"{key} {value}" for key, value in label.items()))
    for heading in ("", "clients", "tokens", "first token", "latency", "tokens/s", "speed-up", "failed", "route"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row["kind"],
            str(row["clients"]),
            "" if row["answer_tokens"] is None else f"{row['answer_tokens']:g}",
            _ms(row["first_token_ms"]),
            _ms(row["latency_ms"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['speed_up']:.2f}x" if row.get("speed_up") else "",
            str(row.get("failed", "")),
            row["route"],
        )
    console.print(table)
