"""The experiment: devices struck at random under a steady stream; is every answer right, how long does it stall?

Hosts in network namespaces on one switch, real daemons behind a mesh key, clients on a host of their own that ask random
entries without pause. Every 2 s somebody is killed, restarted, wiped, frozen, blackholed or partitioned, so that a replica of
each layer is left; once a minute a whole range goes (not on SmolLM2). Each answer must be token for token the undisturbed one,
or a 503 that names layers which nobody held then.

``ROOM_RUNS`` (hash,smollm2,stateless) says which, ``ROOM_SECONDS`` (600,180,180) how long each is struck, ``ROOM_SEED`` (1)
by which schedule, ``ROOM_CALM_S`` (20) and ``ROOM_AFTER_S`` (30) how long it is left alone before and after. Rows of JSON and,
beside them, room-RUN.svg: throughput and answers over time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import RESULTS, Recorder, quantiles
from benchmarks._room_plot import plot
from meshd.cli.chaos import verdict
from meshd.cli.chaos.box import boxed
from meshd.cli.chaos.experiment import Experiment, Load, Report, trace
from meshd.cli.chaos.netlab import lacking
from meshd.cli.chaos.schedule import Plan, Strike
from meshd.cli.models import ensure
from meshd.vocabulary import LayerRange

PROMPTS = tuple(
    f"{opening} " * 4
    for opening in ("Tell me of the sea.", "Count the stars:", "Once upon a time", "The keeper of the lighthouse said")
)
TRACED = 5  # faults, and stalls, that are printed in full
SLOW_S, OUTAGE_SLOW_S = 3.0, 5.0  # a stall that is longer wants an explanation


@dataclass(frozen=True, slots=True)
class Run:
    """One line of the experiment."""

    model: str
    places: Mapping[str, LayerRange | None]
    seconds: float
    load: Load
    outage_every_s: float | None
    flags: tuple[str, ...] = ()
    settle_s: float = 6.0


def thirds(num_layers: int, nodes: int) -> dict[str, LayerRange | None]:
    """Nodes that hold a third each, in turn, and an entry without layers."""
    cuts = [num_layers * i // 3 for i in range(4)]
    places: dict[str, LayerRange | None] = {
        f"n{i + 1}": LayerRange(cuts[i % 3], cuts[i % 3 + 1]) for i in range(nodes - 1)
    }
    return {**places, f"n{nodes}": None}


def halves(num_layers: int, nodes: int) -> dict[str, LayerRange | None]:
    half = num_layers // 2
    return {f"n{i + 1}": (LayerRange(0, half), LayerRange(half, num_layers))[i % 2] for i in range(nodes)}


def runs() -> dict[str, Run]:
    calm_s, after_s = (float(os.environ.get(f"ROOM_{name}_S", default)) for name, default in _CALM)
    load = Load(PROMPTS, calm_s=calm_s, after_s=after_s)
    small = Load(PROMPTS, max_tokens=32, clients=3, calm_s=calm_s, after_s=after_s, patience_s=240.0)
    hashed, ten = "hash:30,step_ms=60,layer_mb=1", thirds(30, 10)
    small_flags = ("--threads", "1", "--capacity-mb", "1500")
    return {
        "hash": Run(hashed, ten, 600.0, load, 60.0, ("--capacity-mb", "200")),
        "smollm2": Run("smollm2-135m", halves(30, 4), 180.0, small, None, small_flags, settle_s=25.0),
        "stateless": Run(hashed, ten, 180.0, load, 60.0, ("--capacity-mb", "200", "--kv", "stateless")),
    }


_CALM = (("CALM", "20"), ("AFTER", "30"))


def run() -> None:
    """Those that ``ROOM_RUNS`` names."""
    missing = lacking()
    if missing:
        print(f"room: skipped, {missing}", file=sys.stderr)
        return
    known = runs()
    names = os.environ.get("ROOM_RUNS", ",".join(known)).split(",")
    lengths = [float(s) for s in os.environ.get("ROOM_SECONDS", "").split(",") if s]
    for i, name in enumerate(names):
        one = known[name]
        run_one(name, one, lengths[i % len(lengths)] if lengths else one.seconds)


def run_one(name: str, one: Run, seconds: float) -> None:
    """One room, from its start to its rows."""
    record, seed = Recorder("room"), int(os.environ.get("ROOM_SEED", "1"))
    store = None if one.model.startswith("hash:") else ensure(one.model)[1]
    plan = Plan(seconds, settle_s=one.settle_s, outage_every_s=one.outage_every_s)
    with boxed(one.model, one.places, *one.flags, store=store) as box:
        began = time.monotonic()
        experiment = Experiment(box, one.places, plan, one.load, seed=seed, heard=lambda *what: _tell(began, *what))
        report = experiment.run()
        rows(record, name, seconds, seed, report)
        for outcome, asked in report.faults()[:TRACED]:
            print(f"== {outcome}: {trace(report, asked, box)}", file=sys.stderr)
        for stall, asked in report.slow(SLOW_S, OUTAGE_SLOW_S)[:TRACED]:
            told = trace(report, asked, box)
            print(f"== {stall.kind} stall of {stall.length_s:.1f} s at {stall.at_s:.2f}: {told}", file=sys.stderr)
    (RESULTS / f"room-{name}.svg").write_text(plot(report, title(name, one, seconds)), encoding="utf-8")


def rows(record: Recorder, name: str, seconds: float, seed: int, report: Report) -> None:
    """What the README tells."""
    figures = report.figures()
    noticed = figures.pop("noticed_s")
    record.row(run=name, seconds=seconds, seed=seed, nodes=len(report.places), **figures)
    record.row(run=name, honest_503_after_s=quantiles(noticed))
    kinds = verdict.by_kind(report.answers, report.done, report.outages)
    for kind, lengths in sorted(kinds.items()):
        record.row(run=name, stall=kind or "unexplained", seconds_of=quantiles(lengths))
    record.row(run=name, stall="all", seconds_of=quantiles([s for lengths in kinds.values() for s in lengths]))
    firsts = [asked.first_s for asked in report.answers if asked.first_s is not None]
    record.row(
        run=name, first_token_s=quantiles(firsts), whole_s=quantiles([a.ended_s - a.began_s for a in report.answers])
    )


def title(name: str, one: Run, seconds: float) -> str:
    return f"{name}: {one.model.partition(',')[0]}, {len(one.places)} nodes, {one.load.clients} clients, {seconds:g} s of strikes"


def _tell(began: float, kind: str, what: Any) -> None:
    """Progress on stderr."""
    if isinstance(what, Strike):
        print(
            f"{time.monotonic() - began:7.1f} {kind} {what.kind} {', '.join(what.nodes)}", file=sys.stderr, flush=True
        )
    elif kind == "phase" or what.code:
        print(
            f"{time.monotonic() - began:7.1f} {what if kind == 'phase' else what.message}", file=sys.stderr, flush=True
        )
