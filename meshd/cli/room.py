"""How a command reaches a room: ``--url``, the key, ``--json``, and what it prints when it is watched."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer
from rich.console import Console
from rich.live import Live

from meshd.client import DEFAULT_URL, Client
from meshd.client.over_httpx import is_sendable, not_an_address
from meshd.config import default_state_dir, is_there
from meshd.errors import StateError, UsageError
from meshd.identity import mesh_key
from meshd.vocabulary import is_model_name

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

# What is printed came from elsewhere: to markup [fd00::2]:8091 would be a style and a port, and :100: a picture.
_PLAIN: Final[Mapping[str, Any]] = {"markup": False, "emoji": False, "highlight": False}
console = Console(width=None if sys.stdout.isatty() else 160, **_PLAIN)
notes = Console(stderr=True, width=None if sys.stderr.isatty() else 160, **_PLAIN)


def state_dir(given: Path | None) -> Path:
    """The folder a command works on: the given one, MESHD_STATE_DIR, else the platform's."""
    told = given or os.environ.get("MESHD_STATE_DIR")
    try:
        return Path(told).expanduser() if told else default_state_dir()
    except RuntimeError as error:  # ~nobody/x
        raise UsageError(f"--state-dir: '{told}': {error}") from None


def connect(urls: Iterable[str] | None, *, timeout_s: float = 60.0, flag: str = "--url") -> Client:
    """A client for the room, with the key from MESHD_API_KEY or the mesh key of this device."""
    return Client(urls_of(urls, flag), key=api_key(state_dir(None)), timeout_s=timeout_s)


def urls_of(given: Iterable[str] | None, flag: str = "--url") -> list[str]:
    """The addresses of a flag, each with its scheme. Raises UsageError naming it."""
    found = [part for url in given or [DEFAULT_URL] for part in url.replace(",", " ").split()]
    if not found:  # a script's variable that holds nothing: this device's own node is not what was meant
        raise UsageError(f"{flag}: no address given")
    urls = [url if "://" in url else f"http://{url}" for url in found]
    for url in urls:
        if wrong := not_an_address(url):
            raise UsageError(f"{flag}: {wrong}")
    return urls


def api_key(state: Path) -> str | None:
    """MESHD_API_KEY, else the key derived from the mesh key in the state folder, else none. No message shows a key."""
    given = os.environ.get("MESHD_API_KEY", "").strip()
    if given and not is_sendable(given):
        raise UsageError("MESHD_API_KEY holds a space, a line's end or another character that no key has")
    if given:
        return given
    told = os.environ.get("MESHD_MESH_KEY")
    path = Path(told or state / "mesh.key")
    try:
        found = is_there(path, "MESHD_MESH_KEY" if told else "--state-dir (MESHD_STATE_DIR)")
        return mesh_key.load(path).api_key() if found else None
    except StateError as error:  # its flag is not this command's
        raise StateError(f"{error.message}; or give an API key in MESHD_API_KEY") from None


def everybody(peers: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The nodes of ``/mesh/peers``, the one that was asked first; while it starts it is not yet among them."""
    return [peer for peer in (peers["self"], *peers["peers"]) if peer is not None]


# --- what people type -------------------------------------------------------------------------------------------------


def text_of(given: str, what: str) -> str:
    """Text that can be sent. Raises UsageError for bytes that are no UTF-8, which Python hands on as halves of characters."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not UTF-8 text") from None
    return given


def model_name(given: str) -> str:
    """A name that a model in the store may have. Raises UsageError for any other text: there can be no such model."""
    if not is_model_name(given):
        raise UsageError(f"{given[:200]!r} is not the name of a model, as `meshd models` shows it")
    return given


def typed(read: Callable[[TextIO], str]) -> str:
    """What ``read`` takes from standard input. Raises UsageError as `text_of`."""
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    try:
        return text_of(read(sys.stdin), "standard input")
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8 text") from None


# --- what is printed --------------------------------------------------------------------------------------------------


def show(
    fetch: Callable[[], Any], draw: Callable[[Any], Any], *, as_json: bool, watch: bool, every_s: float = 1.0
) -> Any:
    """Print a document as JSON or as a table, once or until Ctrl-C. Returns the last document."""
    if as_json and watch:
        raise UsageError("--watch keeps a table up to date; --json prints one document and ends")
    document = fetch()
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
        return document
    if not watch:
        console.print(draw(document))
        return document
    if not console.is_terminal:  # a pipe or a file gets each table below the one before: nothing could be drawn over
        with suppress(KeyboardInterrupt):
            while True:
                console.print(draw(document))
                time.sleep(every_s)
                document = fetch()
        return document
    with (
        Live(draw(document), console=console, screen=False, refresh_per_second=4) as live,
        suppress(KeyboardInterrupt),  # its end, not a failure
    ):
        while True:
            time.sleep(every_s)
            document = fetch()
            live.update(draw(document))
    return document
