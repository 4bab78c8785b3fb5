"""``meshd demo``: a whole mesh of real daemons on loopback, and what it does when one of them is killed."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from meshd.cli import tables
from meshd.cli.ask import route_line
from meshd.cli.chaos.box import Loopback, Struck, boxed
from meshd.cli.chaos.experiment import Experiment, Load, trace
from meshd.cli.chaos.netlab import lacking
from meshd.cli.chaos.schedule import Plan
from meshd.cli.chaos.show import Show, summary
from meshd.cli.local_room import LocalRoom
from meshd.cli.models import ensure
from meshd.cli.room import console, text_of
from meshd.errors import LocalError
from meshd.vocabulary import LayerRange, ModelSpec

MAX_CHAOS_S: Final = 30 * 86400.0
DEFAULT_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


def demo(
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=32, help="How many daemons.")] = 4,
    chaos: Annotated[
        float,
        typer.Option(
            "--chaos",
            min=0,
            max=MAX_CHAOS_S,
            help="Seconds of random kills, freezes and (as root) cuts.",
        ),
    ] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the room running and say what to try.")] = False,
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")] = DEFAULT_PROMPT,
    model: Annotated[str, typer.Option("--model", help="Which model (pulled if absent).")] = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=8, help="Longest answer.")] = 64,
) -> None:
    """Start a room, ask it, ask again while a replica is killed in mid-answer, and compare."""
    text_of(prompt, "--prompt")
    spec, store = ensure(model)
    with _ended_by_signals(), LocalRoom(model, store=store, common=["--threads", "1"]) as room:
        _start(room, spec, nodes)
        alone = _places(spec, nodes)["n1"] == LayerRange(0, spec.num_layers)
        calm = _answer(room, prompt, max_tokens, alone=alone, kill=False)
        stormy = _answer(room, prompt, max_tokens, alone=alone, kill=True)
        _show_comparison(room, calm, stormy)
        in_a_box = bool(chaos) and not keep and not lacking()
        if chaos and not in_a_box:
            typer.echo(
                f"on loopback, so kills and freezes only; to cut devices off too: {lacking() or 'not with --keep'}"
            )
            _chaos(Loopback(room), _places(spec, nodes), prompt, max_tokens, chaos)
        if keep:
            _keep(room)
    if in_a_box:
        _chaos_in_a_box(model, store, nodes, prompt, max_tokens, chaos)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """`kill` and a terminal that is closed end the room as Ctrl-C does: its daemons would outlive this process otherwise. What
    is ignored (nohup) stays so."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    typer.secho(f"== {text}", bold=True)


def _start(room: LocalRoom, spec: ModelSpec, count: int) -> None:
    places = _places(spec, count)
    held = ", ".join(f"{name} {layers}" for name, layers in places.items())
    if count > 3:
        held = "{} and {} in turn".format(*list(places.values())[:2])
    _say(f"starting {count} daemons on loopback: {spec.name}, {held}")
    began = time.monotonic()
    for name, layers in places.items():
        room.add(name, "--layers", str(layers))
    room.wait(nodes=count, replicas=_replicas(count), timeout_s=300)
    typer.echo(f"ready after {time.monotonic() - began:.1f} s")
    _show_hive(room)


def _places(spec: ModelSpec, count: int) -> dict[str, LayerRange | None]:
    """Who holds what: halves in turn; of few nodes some hold all, so that each layer has a second holder."""
    whole, middle = LayerRange(0, spec.num_layers), spec.num_layers // 2
    if count == 2 or middle == 0:
        return {f"n{i + 1}": whole for i in range(count)}
    half = LayerRange(0, middle), LayerRange(middle, spec.num_layers)
    return {f"n{i + 1}": whole if count == 3 and i == 2 else half[i % 2] for i in range(count)}


def _replicas(count: int) -> int:
    return max(2, count // 2)


def _show_hive(room: LocalRoom) -> None:
    with room.client() as client:
        console.print(tables.hive_table(client.get("/mesh/hive")))


def _answer(room: LocalRoom, prompt: str, max_tokens: int, *, alone: bool, kill: bool) -> Mapping[str, Any]:
    """One streamed answer through the first node; with ``kill`` a replica of its route dies a third of the way. ``alone``: a node
    holds all layers, so the second is asked to compute them, lest the entry do it."""
    _say("asking again, and killing a replica in mid-answer" if kill else f"asking: {prompt}")
    route = ["n2"] if alone else None
    final: Mapping[str, Any] = {}
    got, victim = 0, ""
    with room.client("n1") as client:
        pieces = client.stream(messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, route=route)
        for piece in pieces:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            got += len(piece.tokens)
            if kill and not victim and got >= max_tokens // 3:
                victim = _kill_one(room, piece.route)
            final = piece.final or final
    sys.stdout.write("\n")
    typer.echo(f"route: {route_line(final)}")
    return final


def _kill_one(room: LocalRoom, route: tuple[str, ...]) -> str:
    """SIGKILL the last stage of the running route that is not the entry itself."""
    victim = next((name for name in reversed(route) if name != "n1"), "")
    if not victim:
        raise LocalError("the route has no stage to kill besides the entry; use more --nodes")
    room.kill(victim)
    typer.secho(f"[killed {victim}]", fg="red", nl=False)
    return victim


def _show_comparison(room: LocalRoom, calm: Mapping[str, Any], stormy: Mapping[str, Any]) -> None:
    _say("the two answers")
    if calm["tokens"] != stormy["tokens"]:
        raise LocalError(f"the answers differ: {calm['tokens']} and {stormy['tokens']}")
    if not stormy["recoveries"]:
        raise LocalError("the kill came too late to hit the answer; use a longer --max-tokens")
    stall = max(lost["stall_ms"] for lost in stormy["recoveries"])
    typer.echo(f"the same {len(calm['tokens'])} tokens; the kill cost a stall of {stall:.0f} ms")
    _show_hive(room)
    dead = [name for name, node in room.nodes.items() if not node.alive]
    for name in dead:
        room.start(name)
    room.wait(replicas=_replicas(len(room.nodes)), timeout_s=60)
    typer.echo(f"{', '.join(dead)} restarted and serving again")


# --- chaos ------------------------------------------------------------------------------------------------------------


def _chaos(
    struck: Struck, places: Mapping[str, LayerRange | None], prompt: str, max_tokens: int, seconds: float
) -> None:
    """Strikes at random, one replica of each range left, under a steady stream from every entry."""
    _say(f"{seconds:g} s of chaos: {', '.join(struck.kinds)}")
    real = not struck.room.model.startswith("hash:")
    load = Load(
        [prompt, prompt.upper()],
        max_tokens=max_tokens,
        clients=2 if real else 4,
        calm_s=5.0,
        after_s=5.0,
        patience_s=300.0,
    )
    plan = Plan(seconds, kinds=struck.kinds, settle_s=20.0 if real else 6.0)
    seed = random.SystemRandom().randrange(1 << 16)
    with Show(console, places) as show:
        report = Experiment(struck, places, plan, load, seed=seed, heard=show.heard).run()
    for line in summary(report):
        typer.echo(line)
    faults = report.faults()
    for outcome, asked in faults[:3]:
        typer.echo(f"{outcome}: {trace(report, asked, struck)}", err=True)
    if faults or report.hanging:
        raise LocalError(f"{len(faults) + report.hanging} answers are neither right nor an honest 503 (seed {seed})")
    typer.secho("every answer is the undisturbed one", fg="green")


def _chaos_in_a_box(model: str, store: Path | None, count: int, prompt: str, max_tokens: int, seconds: float) -> None:
    """On hosts of their own, which can also lose their network."""
    places = _places(ensure(model)[0], count)
    _say(f"starting {count} hosts in network namespaces")
    with _ended_by_signals(), boxed(model, places, "--threads", "1", store=store) as box:
        _chaos(box, places, prompt, max_tokens, seconds)


def _keep(room: LocalRoom) -> None:
    first, last = (node.url for node in (room.nodes["n1"], list(room.nodes.values())[-1]))
    _say("the room keeps running until Ctrl-C; try")
    typer.echo(f"  curl -s {first}/mesh/hive")
    typer.echo(f'  curl -s {last}/chain -d \'{{"prompt": "The capital of France is", "max_tokens": 8}}\'')
    typer.echo(f"  meshd ask --url {first} --url {last} --show-route 'Why is the sky blue?'")
    typer.echo(f"  meshd peers --watch --url {first}")
    for node in room.nodes.values():
        typer.echo(f"  kill -9 {node.process.pid if node.process else '-'}   # {node.name}")
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        typer.echo()
