"""``meshd peers | hive | routes | status``: the reading endpoints as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from meshd.cli.room import Json, Url, Watch, connect, everybody, show

_STATE_STYLE = {"alive": "green", "suspect": "yellow", "draining": "cyan", "dead": "red", "left": "dim"}
_SPARE: Final = ("free", "tok/s", "queue", "rtt", "heard")
_UNBOUNDED: Final = 10_000
HEALTHY, NO_REDUNDANCY, BROKEN = 0, 3, 4


def peers(url: Url = None, watch: Watch = False, as_json: Json = False) -> None:
    """Every node as this one sees it."""
    with connect(url, timeout_s=10) as room:
        show(lambda: room.get("/mesh/peers"), peers_table, as_json=as_json, watch=watch)


def hive(
    url: Url = None,
    watch: Watch = False,
    as_json: Json = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 0 healthy, 3 no redundancy, 4 broken.")] = False,
) -> None:
    """Which layers are held how often, and what is missing."""
    with connect(url, timeout_s=10) as room:
        document = show(lambda: room.get("/mesh/hive"), hive_table, as_json=as_json, watch=watch)
    if check:
        raise typer.Exit(hive_verdict(document))


def routes(url: Url = None, watch: Watch = False, as_json: Json = False) -> None:
    """The routes this node has measured, and how traffic is shared among them."""
    with connect(url, timeout_s=10) as room:
        show(lambda: room.get("/v1/routing"), routes_table, as_json=as_json, watch=watch)


def status(url: Url = None, watch: Watch = False, as_json: Json = False) -> None:
    """This node: state, memory, queue, counters, warnings."""
    with connect(url, timeout_s=10) as room:
        show(lambda: room.get("/status"), status_table, as_json=as_json, watch=watch)


def hive_verdict(document: Mapping[str, Any]) -> int:
    """The exit status of ``hive --check``."""
    if document["status"] == "healthy":
        return HEALTHY
    return NO_REDUNDANCY if document["status"].startswith("healthy") else BROKEN


def _layers(pair: Any) -> str:
    return f"{pair[0]}..{pair[1]}" if pair else "-"


def peers_table(document: Mapping[str, Any]) -> RenderableType:
    """A row a node."""
    return _Fitting([_peer_row(peer, is_asked=peer is document["self"]) for peer in everybody(document)])


def _peer_row(peer: Mapping[str, Any], *, is_asked: bool) -> dict[str, str | Text]:
    """What is said of a node, by heading."""
    health = peer.get("status") or {}
    admitted = {True: "yes", False: f"no: {peer.get('admission') or ''}", None: "not yet"}[peer.get("admitted")]
    return {
        "name": peer["name"] + (" (this node)" if is_asked else ""),
        "state": Text(peer["state"], style=_STATE_STYLE.get(peer["state"], "")),
        "role": peer["role"],
        "layers": _layers(peer["layers"]),
        "admitted": "-" if peer["layers"] is None or peer["state"] in ("dead", "left") else admitted,
        "heard": "" if is_asked or peer["last_heard_s"] is None else f"{peer['last_heard_s']:.1f} s",
        "rtt": "" if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.1f} ms",
        "queue": str(health.get("queue_depth", "")) + (" jammed" if health.get("jammed") else ""),
        "tok/s": f"{health.get('tokens_per_s', 0):.1f}",
        "free": f"{health.get('ram_free_mb', 0)} MB",
        "address": (peer["mesh"] or "") + (" one-way" if peer.get("one_way") else ""),
    }


class _Fitting:
    """Rows of the same headings as a table. Where not all fit, those of `_SPARE` are left out one by one: a terminal of 80
    columns shows the rest whole instead of the beginning of everything."""

    def __init__(self, rows: Sequence[Mapping[str, str | Text]]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=_UNBOUNDED)
        for left_out in range(len(_SPARE) + 1):
            table = self._table(_SPARE[:left_out])
            if Measurement.get(console, unbounded, table).maximum <= options.max_width:
                break
        yield table

    def _table(self, without: Sequence[str]) -> Table:
        headings = [heading for heading in (self._rows[0] if self._rows else ()) if heading not in without]
        table = Table(*(Column(heading, no_wrap=True) for heading in headings), box=None, pad_edge=False)
        for row in self._rows:
            table.add_row(*(row[heading] for heading in headings))
        return table


def headline(hive: Mapping[str, Any]) -> Text:
    """Model and status; a room without a model has but a status, which says so."""
    return Text(f"{hive['model']}: {hive['status']}" if hive["model"] else str(hive["status"]), style="bold")


def hive_table(document: Mapping[str, Any]) -> RenderableType:
    """The status in words, a bar a stage, and a line for whatever is wrong."""
    table = Table(box=None, pad_edge=False)
    for heading in ("layers", "replicas"):
        table.add_column(heading)
    for start, end, replicas in document["stages"]:
        table.add_row(f"{start}..{end}", "#" * replicas + f" {replicas}")
    notes = [f"missing {_layers(pair)}" for pair in document["missing"]]
    notes += [f"{_layers(single)} only on {single[2]}" for single in document["single"]]
    notes += [
        f"{load['name']} is loading {_layers(load['layers'])} ({load['progress']:.0%})" for load in document["loading"]
    ]
    notes += [f"{refused['name']} not admitted: {refused['reason']}" for refused in document["not_admitted"]]
    notes += [f"{name} jammed" for name in document["jammed"]]
    shown = [table] if document["stages"] else []
    return Group(headline(document), *shown, *map(Text, notes))


def routes_table(document: Mapping[str, Any]) -> RenderableType:
    """A table a model, a row a route."""
    tables: list[RenderableType] = []
    for model, entry in document["models"].items():
        table = Table(title=f"{model}, epoch {entry['epoch']}", box=None, pad_edge=False, title_justify="left")
        for heading in ("route", "status", "tok/s", "prior", "coefficient", "share", "samples"):
            table.add_column(heading)
        for arm in entry["candidates"]:
            table.add_row(
                arm["signature"].partition("|")[2],
                arm["status"],
                "-" if arm["tps"] is None else f"{arm['tps']:.1f}",
                f"{arm['prior_tps']:.1f}",
                "-" if arm["coefficient"] is None else f"{arm['coefficient']:.2f}",
                f"{arm['expected_share']:.0%}",
                str(arm["samples"]),
            )
        tables.append(table)
    return Group(*tables) if tables else Text("no routes yet")


def status_table(document: Mapping[str, Any]) -> RenderableType:
    """A row a fact."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in document.items():
        if shown := _fact(key, value):
            table.add_row(key, shown)
    return table


def _fact(key: str, value: Any) -> str:
    """One fact in words; "" where there is nothing to say."""
    if value is None:
        return ""
    if key == "layers":
        return _layers(value)
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items())
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
