"""``meshd drain`` and ``meshd resume``: hand over running work, and take work again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from meshd.cli.room import Url, connect
from meshd.errors import LocalError


def drain(
    url: Url = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for running work.")] = 60.0,
) -> None:
    """Hand running sessions to other replicas and take no more work."""
    give_up = time.monotonic() + timeout
    with connect(url, timeout_s=10) as room:
        room.post("/admin/drain")
        while running := _running(room.get("/status")):
            if time.monotonic() >= give_up:
                raise LocalError(f"{running} still run after {timeout:g} s; they keep running, nothing new starts")
            time.sleep(0.1)
    typer.echo("drained")


def _running(status: Mapping[str, Any]) -> str:
    """What the node has not handed over yet."""
    kinds = {"requests that it answers": status.get("owned"), "sessions through its layers": status.get("relayed")}
    return " and ".join(f"{count} {what}" for what, count in kinds.items() if count)


def resume(url: Url = None) -> None:
    """Take work again after a drain."""
    with connect(url, timeout_s=10) as room:
        room.post("/admin/resume")
    typer.echo("taking work")
