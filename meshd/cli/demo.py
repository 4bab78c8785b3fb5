"""``meshd demo``: a whole mesh of real daemons on loopback, and what it does when one of them is killed."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from meshd.cli import tables
from meshd.cli.ask import route_line
from meshd.cli.local_room import LocalRoom
from meshd.cli.models import ensure
from meshd.cli.room import console
from meshd.errors import LocalError, MeshdError
from meshd.vocabulary import LayerRange, ModelSpec

DEFAULT_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


def demo(
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=32, help="How many daemons.")] = 4,
    chaos: Annotated[float, typer.Option("--chaos", min=0, help="Seconds of random kills and freezes under load.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the room running and say what to try.")] = False,
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")] = DEFAULT_PROMPT,
    model: Annotated[str, typer.Option("--model", help="Which model (pulled if absent).")] = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=8, help="Longest answer.")] = 64,
) -> None:
    """Start a room, ask it, ask again while a replica is killed in mid-answer, and compare."""
    spec, store = ensure(model)
    with LocalRoom(model, store=store, common=["--threads", "1"]) as room:
        _start(room, spec, nodes)
        calm = _answer(room, prompt, max_tokens, kill=False)
        stormy = _answer(room, prompt, max_tokens, kill=True)
        _show_comparison(room, calm, stormy)
        if chaos:
            _chaos(room, prompt, max_tokens, calm["tokens"], chaos)
        if keep:
            _keep(room)


def _say(text: str) -> None:
    typer.secho(f"== {text}", bold=True)


def _start(room: LocalRoom, spec: ModelSpec, count: int) -> None:
    half = LayerRange(0, spec.num_layers // 2), LayerRange(spec.num_layers // 2, spec.num_layers)
    _say(f"starting {count} daemons on loopback: {spec.name}, {half[0]} and {half[1]} in turn")
    began = time.monotonic()
    for i in range(count):
        room.add(f"n{i + 1}", "--layers", str(half[i % 2]))
    room.wait(nodes=count, replicas=count // 2, timeout_s=300)
    typer.echo(f"ready after {time.monotonic() - began:.1f} s")
    _show_hive(room)


def _show_hive(room: LocalRoom) -> None:
    with room.client() as client:
        console.print(tables.hive_table(client.get("/mesh/hive")))


def _answer(room: LocalRoom, prompt: str, max_tokens: int, *, kill: bool) -> Mapping[str, Any]:
    """One streamed answer through the first node; with ``kill`` a replica of its route dies a third of the way."""
    _say("asking again, and killing a replica in mid-answer" if kill else f"asking: {prompt}")
    final: Mapping[str, Any] = {}
    got, victim = 0, ""
    with room.client("n1") as client:
        pieces = client.stream(messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens)
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
    room.wait(replicas=len(room.nodes) // 2, timeout_s=60)
    typer.echo(f"{', '.join(dead)} restarted and serving again")


# --- chaos ------------------------------------------------------------------------------------------------------------


def _chaos(room: LocalRoom, prompt: str, max_tokens: int, expected: list[int], seconds: float) -> None:
    """Kills and freezes at random, one replica of each range left, under a steady stream from every entry."""
    _say(f"{seconds:g} s of random kills and freezes under a steady stream")
    tally: Counter[str] = Counter()
    stalls: list[float] = []
    over = threading.Event()

    def ask_again_and_again(names: list[str]) -> None:
        with room.client(*names) as client:
            while not over.is_set():
                try:
                    answer = client.ask(messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens)
                except MeshdError as error:
                    tally[f"error: {error.message}"] += 1
                    continue
                tally["right" if answer["tokens"] == expected else "WRONG"] += 1
                stalls.extend(lost["stall_ms"] for lost in answer["recoveries"])

    names = list(room.nodes)
    clients = [threading.Thread(target=ask_again_and_again, args=(names[i:] + names[:i],)) for i in range(2)]
    for thread in clients:
        thread.start()
    _disturb(room, seconds, tally)
    over.set()
    for thread in clients:
        thread.join(120)
    for what, count in sorted(tally.items()):
        typer.echo(f"{count:5d} {what}")
    if stalls:
        ordered = sorted(stalls)
        typer.echo(f"stalls at recovery: median {ordered[len(ordered) // 2]:.0f} ms, longest {ordered[-1]:.0f} ms")
    if tally["WRONG"]:
        raise LocalError(f"{tally['WRONG']} answers differ from the undisturbed one")


def _disturb(room: LocalRoom, seconds: float, tally: Counter[str]) -> None:
    rng = random.Random()  # noqa: S311  # chaos needs no cryptography
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        victim = rng.choice(list(room.nodes))
        if rng.random() < 0.5:
            tally["kills"] += 1
            room.kill(victim)
            time.sleep(2)
            room.start(victim)
        else:
            tally["freezes"] += 1
            room.freeze(victim)
            time.sleep(3)
            room.thaw(victim)
        # The next victim may be the other replica of the same range: first let this one serve again.
        room.wait(replicas=len(room.nodes) // 2, timeout_s=60)


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
