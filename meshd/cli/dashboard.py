"""``meshd dashboard``: the node's page in a browser, with the key if it needs one."""

from __future__ import annotations

import webbrowser
from typing import Annotated
from urllib.parse import quote

import httpx
import typer

from meshd.cli.room import Url, api_key, state_dir, urls_of
from meshd.client import NoEntry
from meshd.errors import Unauthorized

_ANSWER_S = 5.0


def dashboard(
    url: Url = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the address, with its key, and open nothing.")
    ] = False,
) -> None:
    """Open the dashboard. The key, where one is needed, goes behind the #, which no browser sends to anybody."""
    base = urls_of(url)[0].rstrip("/")
    key = api_key(state_dir(None)) if _needs_key(base) else ""
    if key is None:
        raise Unauthorized(
            f"{base} asks for a key: set MESHD_API_KEY to what `meshd key show --api` prints on its device"
        )
    page = f"{base}/#key={quote(key)}" if key else f"{base}/"
    if only_print or not webbrowser.open(page):
        typer.echo(page)
    else:
        typer.echo(f"opened {base}/")


def _needs_key(base: str) -> bool:
    try:
        return httpx.get(f"{base}/status", timeout=_ANSWER_S, trust_env=False).status_code == Unauthorized.status
    except httpx.RequestError as error:
        raise NoEntry(f"{base}: {error}; is a node running there? (`meshd start`, or --url)") from None
