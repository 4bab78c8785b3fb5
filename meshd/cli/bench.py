"""``meshd bench``: what a room does for its clients, measured from outside.

Rows are labelled cold (the first request of a prompt) or warm, with model, dtype, nodes, route and the power state of the room
(on mains, on battery, or mixed: laptops slow down on battery, and a figure without that is half a figure).
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from meshd.cli.ask import MAX_TOKENS
from meshd.cli.room import Json, Url, connect, console, everybody
from meshd.client import Client
from meshd.errors import MeshdError, UsageError

PROMPT = "Explain in a few sentences how a lighthouse works, number {n}."


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds to the first token and in all, tokens, and who computed them."""

    first_s: float
    total_s: float
    tokens: int
    route: str


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
        cold = _ask(room, 0, max_tokens)
        warm = [_ask(room, 0, max_tokens) for _ in range(requests)]
    rows = [_row(label, "cold", 1, [cold], cold.total_s), _row(label, "warm", 1, warm, sum(s.total_s for s in warm))]
    alone = rows[-1]["tokens_per_s"]
    for clients in levels:
        samples, failed, wall_s = _together(url, clients, requests, max_tokens)
        row = _row(label, "warm", clients, samples, wall_s)
        rows.append({**row, "failed": failed, "speed_up": round(row["tokens_per_s"] / alone, 2) if alone else None})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _draw(label, rows)
    if any(row.get("failed") for row in rows):
        raise typer.Exit(1)


def label_of(peers: Mapping[str, Any], hive: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured: model, dtype, nodes and the power state."""
    nodes = everybody(peers)
    mains = [peer["status"].get("on_ac") for peer in nodes if peer["state"] == "alive" and peer.get("status")]
    known = {value for value in mains if value is not None}
    power = "mixed" if len(known) > 1 else "battery" if known == {False} else "mains"
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


def _together(
    urls: Sequence[str] | None, clients: int, requests: int, max_tokens: int
) -> tuple[list[Sample], int, float]:
    """So many clients at once, each its own prompt: samples, failures, seconds for all of it."""
    samples: list[Sample] = []
    failures: list[str] = []

    def client(number: int) -> None:
        with connect(urls) as room:
            for _ in range(requests):
                try:
                    samples.append(_ask(room, number, max_tokens))
                except MeshdError as error:
                    failures.append(error.message)

    threads = [threading.Thread(target=client, args=(i + 1,)) for i in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples, len(failures), time.monotonic() - began


def _row(label: Mapping[str, Any], kind: str, clients: int, samples: Sequence[Sample], wall_s: float) -> dict[str, Any]:
    tokens = sum(sample.tokens for sample in samples)
    return {
        **label,
        "kind": kind,
        "clients": clients,
        "requests": len(samples),
        "first_token_ms": round(1e3 * statistics.median([s.first_s for s in samples]), 1) if samples else None,
        "latency_ms": round(1e3 * statistics.median([s.total_s for s in samples]), 1) if samples else None,
        "tokens_per_s": round(tokens / wall_s, 2) if wall_s else 0.0,
        "route": max({s.route for s in samples}, key=[s.route for s in samples].count) if samples else "",
    }


def _draw(label: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, title=", ".join(f"{key} {value}" for key, value in label.items()))
    for heading in ("", "clients", "first token", "latency", "tokens/s", "speed-up", "failed", "route"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row["kind"],
            str(row["clients"]),
            f"{row['first_token_ms']} ms",
            f"{row['latency_ms']} ms",
            f"{row['tokens_per_s']:.1f}",
            f"{row['speed_up']:.2f}x" if row.get("speed_up") else "",
            str(row.get("failed", "")),
            row["route"],
        )
    console.print(table)
