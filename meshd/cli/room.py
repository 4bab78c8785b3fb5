"""How a command reaches a room: ``--url``, the key, ``--json``, and what it prints when it is watched."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from meshd.client import DEFAULT_URL, Client
from meshd.config import default_state_dir
from meshd.identity import mesh_key

Url = Annotated[
    list[str] | None,
    typer.Option(
        "--url", envvar="MESHD_URL", help=f"A node's address; several: the next one is tried. [{DEFAULT_URL}]"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Watch = Annotated[bool, typer.Option("--watch", help="Keep the table up to date until Ctrl-C.")]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", envvar="MESHD_STATE_DIR", help="The node's state folder.")
]

console = Console(width=None if sys.stdout.isatty() else 160)
notes = Console(stderr=True, width=None if sys.stderr.isatty() else 160)


def state_dir(given: Path | None) -> Path:
    """The folder a command works on: the given one, MESHD_STATE_DIR, else the platform's."""
    told = given or os.environ.get("MESHD_STATE_DIR")
    return Path(told).expanduser() if told else default_state_dir()


def connect(urls: Iterable[str] | None, *, timeout_s: float = 60.0) -> Client:
    """A client for the room, with the key from MESHD_API_KEY or the mesh key of this device."""
    return Client(urls_of(urls), key=api_key(state_dir(None)), timeout_s=timeout_s)


def urls_of(given: Iterable[str] | None) -> list[str]:
    """The addresses of ``--url``, each with its scheme."""
    found = [part for url in given or [] for part in url.replace(",", " ").split()] or [DEFAULT_URL]
    return [url if "://" in url else f"http://{url}" for url in found]


def api_key(state: Path) -> str | None:
    """MESHD_API_KEY, else the key derived from the mesh key in the state folder, else none."""
    given = os.environ.get("MESHD_API_KEY")
    if given:
        return given
    path = Path(os.environ.get("MESHD_MESH_KEY") or state / "mesh.key")
    return mesh_key.load(path).api_key() if path.exists() else None


def show(
    fetch: Callable[[], Any], draw: Callable[[Any], Any], *, as_json: bool, watch: bool, every_s: float = 1.0
) -> Any:
    """Print a document as JSON or as a table, once or until Ctrl-C. Returns the last document."""
    document = fetch()
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
        return document
    if not watch:
        console.print(draw(document))
        return document
    with Live(draw(document), console=console, screen=False, refresh_per_second=4) as live:
        while True:
            time.sleep(every_s)
            document = fetch()
            live.update(draw(document))
