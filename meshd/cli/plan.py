"""``meshd elect`` and ``meshd plan``: who should hold what, asked of a live room or of one that does not exist."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table

from meshd.cli.models import ensure
from meshd.cli.room import Json, connect, console, everybody
from meshd.election.capacity import MOST_MB, Device, measured_capacity_mb, sane_ms
from meshd.election.elect import assign, smallest_layer_mb
from meshd.election.plan import Plan
from meshd.election.plan import plan as plan_room
from meshd.election.settings import Settings
from meshd.errors import DoesNotFit, LocalError, UsageError
from meshd.vocabulary import MB, LayerRange, ModelSpec, NodeId

EXTRA = 3  # every range has its target already
_ME = NodeId("f" * 32)


def elect(
    seed: Annotated[str, typer.Option("--seed", help="A live node's address.")],
    capacity_mb: Annotated[
        int | None, typer.Option("--capacity-mb", min=0, max=MOST_MB, help="MB (2^20); default: this device.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The range that a device with so much memory should take in a live room. Changes nothing.

    Exit 3: every range has its target (the one it would strengthen is printed); 1: too small for one layer.
    """
    if capacity_mb is None:
        capacity_mb = measured_capacity_mb(psutil.virtual_memory().available / MB)
    settings = Settings()
    with connect([seed], timeout_s=10, flag="--seed") as room:
        spec = spec_of(room.get("/mesh/model"))
        if not 0 < spec.num_layers == len(spec.layer_bytes):
            raise LocalError(f"{seed}: {len(spec.layer_bytes)} layer_bytes of {spec.num_layers} layers: is this meshd?")
        document = room.get("/mesh/peers")
    devices = [*devices_of(everybody(document), spec.digest), Device(_ME, capacity_mb, sane_ms(0))]
    decision = assign(spec, devices, settings)[_ME]
    if decision.layers is None:
        need_mb = smallest_layer_mb(spec, settings)
        raise DoesNotFit(
            f"{capacity_mb} MB are too small for one layer of {spec.name}: {need_mb - capacity_mb} MB short"
            f" ({need_mb} needed)"
        )
    if as_json:
        typer.echo(json.dumps({"layers": decision.layers.json(), "why": decision.why, "capacity_mb": capacity_mb}))
    else:
        typer.echo(str(decision.layers))
    if decision.why == "extra":
        raise typer.Exit(EXTRA)


def plan(
    model: Annotated[str, typer.Argument(help="A model's name, pulled if absent, or hash:L,layer_mb=M.")],
    nodes: Annotated[str, typer.Option("--nodes", help="What each gives to weights in MB, such as 2400,2400,8000.")],
    speeds: Annotated[str, typer.Option("--speeds", help="Relative speeds, such as 1,1,2.")] = "",
    without: Annotated[int | None, typer.Option("--without", help="And what happens without node I (from 1)?")] = None,
    kv_reserve: Annotated[
        float,
        typer.Option("--kv-reserve", min=0, max=0.9, help="Share of each figure that is kept for KV instead."),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Who would hold what in a room that does not exist, what is missing, and what one device's loss would do."""
    capacities = _numbers("--nodes", nodes, 0.0, MOST_MB)
    relative = _numbers("--speeds", speeds, 1e-9, 1e9)
    if not capacities:
        raise UsageError("--nodes: no capacity given")
    if relative and len(relative) != len(capacities):
        raise UsageError(f"--speeds: {len(relative)} speeds for {len(capacities)} nodes")
    if without is not None and not 1 <= without <= len(capacities):
        raise UsageError(f"--without: {without} is not one of the {len(capacities)} nodes")
    spec, _ = ensure(model)
    gone = without - 1 if without is not None else None
    found = plan_room(spec, capacities, Settings(kv_reserve=kv_reserve), speeds=relative, without=gone)
    if as_json:
        typer.echo(json.dumps({**_document(spec, found), "without": without}, indent=2))
    else:
        if without is not None:
            typer.echo(f"without node {without}, and before anybody has moved:")
        _draw(spec, found)
    if not found.covered:
        raise LocalError(f"{spec.name}: {_short(found)}")


def spec_of(document: Mapping[str, Any]) -> ModelSpec:
    """The sizes of a model as ``/mesh/model`` tells them: all that an election needs."""
    embed, head = int(document["embed_bytes"]), int(document["head_bytes"])
    return ModelSpec(
        name=document["model"],
        digest=document["digest"],
        dtype=document["dtype"],
        num_layers=document["num_layers"],
        hidden_size=document["hidden_size"],
        vocab_size=0,
        layer_bytes=tuple(document["layer_bytes"]),
        embed_bytes=embed,
        head_bytes=head,
        tied=bool(document.get("tied")),
        kv_bytes_per_token_layer=document["kv_bytes_per_token_layer"],
        context=document["context"],
    )


def devices_of(peers: Sequence[Mapping[str, Any]], digest: str) -> list[Device]:
    """The devices of ``/mesh/peers`` that hold or may hold layers of this model."""
    found = []
    for peer in peers:
        if peer["digest"] not in (None, "", digest) or peer["state"] not in ("alive", "suspect"):
            continue
        held = peer["layers"] or (peer["loading"] or {}).get("layers")
        layers = LayerRange(*held) if held else None
        if layers is not None or peer["state"] == "alive":
            found.append(Device(peer["node_id"], peer["capacity_mb"] or 0, sane_ms(peer["layer_ms"] or 0), layers))
    return found


def _numbers(flag: str, text: str, low: float, high: float) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{flag}: {text[:200]!r} is not a list of numbers such as 2400,8000") from None
    for number in numbers:
        if not low <= number <= high:  # false for nan too
            raise UsageError(f"{flag}: {number:g} is not between {low:g} and {high:g}")
    return numbers


def _document(spec: ModelSpec, found: Plan) -> dict[str, Any]:
    return {
        "model": spec.name,
        "num_layers": spec.num_layers,
        "nodes": [
            {
                "node": seat.index + 1,
                "capacity_mb": seat.capacity_mb,
                "layers": seat.layers.json() if seat.layers else None,
                "weight_mb": round(seat.weight_mb, 1),
                "why": seat.why,
                "short_mb": seat.short_mb,
            }
            for seat in found.seats
        ],
        "missing": [gap.json() for gap in found.missing],
        "single": [layers.json() for layers in found.single],
        "short_mb": found.short_mb,
        "covered": found.covered,
    }


def _short(found: Plan) -> str:
    return f"layers {', '.join(map(str, found.missing))} are missing: {found.short_mb} MB short"


def _draw(spec: ModelSpec, found: Plan) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("node", "MB", "layers", "weights", "why", ""):
        table.add_column(heading)
    width = min(60, spec.num_layers)
    for seat in found.seats:
        bar = ""
        if seat.layers is not None:
            start, end = (round(edge * width / spec.num_layers) for edge in (seat.layers.start, seat.layers.end))
            bar = "." * start + "#" * (end - start) + "." * (width - end)
        table.add_row(
            str(seat.index + 1),
            f"{seat.capacity_mb:g}",
            str(seat.layers or "-"),
            f"{seat.weight_mb:.0f} MB",
            seat.why,
            bar,
        )
    console.print(table)
    if found.single:
        typer.echo("only one replica: " + ", ".join(map(str, found.single)))
