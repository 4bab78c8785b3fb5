"""``meshd wait``: for scripts that must not go on before the room is there."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from meshd.cli.room import Url, connect
from meshd.client import Client, RequestFailed
from meshd.errors import Forbidden, LocalError, MeshdError, Unauthorized

_REFUSED: Final = (Unauthorized.status, Forbidden.status)


def wait(
    url: Url = None,
    ready: Annotated[bool, typer.Option("--ready", help="All layers are covered.")] = False,
    nodes: Annotated[int, typer.Option("--nodes", min=0, help="So many nodes are alive, this one included.")] = 0,
    replicas: Annotated[int, typer.Option("--replicas", min=0, help="Every layer is held so often.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds.")] = 60.0,
) -> None:
    """Wait until the room is as asked; exit 1 with what is missing when it takes too long."""
    give_up = time.monotonic() + timeout
    while True:
        try:
            with connect(url, timeout_s=5) as room:
                lacking = _lacking(room, ready=ready, nodes=nodes, replicas=replicas)
        except MeshdError as error:
            if isinstance(error, LocalError) or (isinstance(error, RequestFailed) and error.http_status in _REFUSED):
                raise  # of this device or its caller: no wait cures it
            lacking = error.message
        if not lacking:
            return
        if time.monotonic() >= give_up:
            raise LocalError(f"not within {timeout:g} s: {lacking}")
        time.sleep(0.1)


def _lacking(room: Client, *, ready: bool, nodes: int, replicas: int) -> str:
    hive = room.get("/mesh/hive")
    state = room.get("/status")["state"]
    if state in ("starting", "loading", "proving"):
        return f"the node is {state}"
    if (ready or replicas) and not hive["status"].startswith("healthy"):
        return str(hive["status"])
    if hive["min_replicas"] < replicas:
        return f"{hive['min_replicas']} of {replicas} replicas"
    return f"{hive['nodes']} of {nodes} nodes" if hive["nodes"] < nodes else ""
