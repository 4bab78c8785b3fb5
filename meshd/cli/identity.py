"""``meshd identity``: the node key of this device."""

from __future__ import annotations

import json

import typer

from meshd.cli.room import Json, StateDir, state_dir
from meshd.errors import LocalError
from meshd.identity import node_key
from meshd.identity.state_folder import StateFolder

app = typer.Typer(help="The node key: who this device is.", no_args_is_help=True)


@app.command()
def show(state: StateDir = None, as_json: Json = False) -> None:
    """This device's node id."""
    folder = state_dir(state)
    key = node_key.show(folder)
    if key is None:
        raise LocalError(f"no identity in {folder} yet; the first `meshd start` makes it")
    document = {"node_id": key.node_id, "public_key": key.public.hex(), "state_dir": str(folder)}
    typer.echo(json.dumps(document, indent=2) if as_json else key.node_id)


@app.command()
def new(state: StateDir = None) -> None:
    """A new identity for a device whose disk was cloned. Refuses while the daemon runs."""
    with StateFolder(state_dir(state)) as folder:
        key = node_key.renew(folder)
    typer.echo(key.node_id)
