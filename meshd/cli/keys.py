"""``meshd key``: the mesh key of this device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshd.cli.room import Json, StateDir, state_dir, typed
from meshd.config import is_there
from meshd.identity import mesh_key
from meshd.identity.mesh_key import KeyRing, MeshKey

app = typer.Typer(help="The mesh key: whoever has it is a member of the room.", no_args_is_help=True)
MeshKeyFile = Annotated[Path | None, typer.Option("--mesh-key", envvar="MESHD_MESH_KEY", help="The key file.")]


def _path(state: Path | None, given: Path | None) -> Path:
    return given or state_dir(state) / "mesh.key"


def _with(path: Path, key: MeshKey) -> KeyRing:
    """The ring of a file and this key; the key alone where there is no file yet."""
    return mesh_key.load(path).add(key) if is_there(path, "--mesh-key") else KeyRing((key,))


@app.command(short_help="Make a key, or a further one for the ring.")
def new(state: StateDir = None, file: MeshKeyFile = None) -> None:
    """Make a key, or add a further one to a ring (then `key use` it when every device has it). Prints the next device's line."""
    path = _path(state, file)
    key = MeshKey.generate()
    mesh_key.save(path, _with(path, key))
    typer.echo("on each further device, run:", err=True)
    typer.echo(key.add_command())


@app.command()
def show(
    state: StateDir = None,
    file: MeshKeyFile = None,
    api: Annotated[
        bool, typer.Option("--api", help="The API key that the mesh key derives, for HTTP clients.")
    ] = False,
    as_json: Json = False,
) -> None:
    """The line for the next device and the ids of the ring's keys."""
    ring = mesh_key.load(_path(state, file))
    if as_json:
        keys = [{"mesh_id": key.mesh_id(), "line": key.line(), "api_key": key.api_key()} for key in ring.keys]
        typer.echo(json.dumps({"mesh_id": ring.mesh_id(), "keys": keys}, indent=2))
    elif api:
        typer.echo(ring.api_key())
    else:
        typer.echo(ring.first.add_command())
        for i, key in enumerate(ring.keys):
            typer.echo(f"{key.mesh_id()} {'sends' if i == 0 else 'accepted'}", err=True)


@app.command(short_help="Take another device's key.")
def add(
    line: Annotated[
        list[str] | None, typer.Argument(help="What `meshd key new` printed; - or nothing reads stdin.")
    ] = None,
    state: StateDir = None,
    file: MeshKeyFile = None,
) -> None:
    """Take another device's key: accepted at once, used first if it is the only one."""
    text = " ".join(line or ["-"])
    if text == "-":
        if sys.stdin is not None and sys.stdin.isatty():
            typer.echo("paste the line and press Enter:", err=True)
        text = typed(lambda stdin: stdin.readline())
    key = MeshKey.parse(text)
    path = _path(state, file)
    mesh_key.save(path, _with(path, key))
    typer.echo(f"{key.mesh_id()} added to {path}; running daemons read it within seconds")


@app.command()
def use(
    mesh_id: Annotated[str | None, typer.Argument(help="Which key (default: the one added last).")] = None,
    state: StateDir = None,
    file: MeshKeyFile = None,
) -> None:
    """Send with this key from now on. Every device must have it first."""
    path = _path(state, file)
    ring = mesh_key.load(path).use(mesh_id)
    mesh_key.save(path, ring)
    typer.echo(f"{ring.mesh_id()} sends")


@app.command()
def drop(
    mesh_id: Annotated[str | None, typer.Argument(help="Which key (default: the last).")] = None,
    state: StateDir = None,
    file: MeshKeyFile = None,
) -> None:
    """Accept a key no longer. The key in use cannot be dropped."""
    path = _path(state, file)
    before = mesh_key.load(path)
    after = before.drop(mesh_id)
    mesh_key.save(path, after)
    gone = next(key for key in before.keys if key not in after.keys)
    typer.echo(f"{gone.mesh_id()} dropped")
