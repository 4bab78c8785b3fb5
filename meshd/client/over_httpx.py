"""What both kinds of client have in common in front of httpx: what it takes for an address and a key, and how it fails."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import httpx

from meshd.client.answer import CONNECT_S, Post
from meshd.client.entries import Entries, NoEntry
from meshd.errors import Unauthorized

_KEPT: Final = 20  # connections that nobody uses


def entries_of(urls: Sequence[str] | str) -> Entries:
    """The entries, all of them addresses. Raises NoEntry: asking one that is none would raise errors of many kinds."""
    entries = Entries(urls)
    for url in entries.urls:
        if wrong := not_an_address(url):
            raise NoEntry(wrong)
    return entries


def not_an_address(url: str) -> str:
    """Why nothing can be asked at this URL, naming it; "" for an address. A name need not exist."""
    try:
        found = httpx.URL(url)
        found.host.encode("idna")  # as the resolver will; an empty or endless label is an error of its own kind there
        sound = found.scheme in ("http", "https") and bool(found.host) and 0 <= (found.port or 0) <= 65535
    except (httpx.InvalidURL, ValueError):  # a name that cannot be encoded is a ValueError
        sound = False
    return "" if sound else f"{url[:200]!r} is not an address such as http://HOST:8090"


def is_sendable(key: str) -> bool:
    """A key can stand in a header: no space, no line's end, nothing unseen."""
    return key.isprintable() and " " not in key


def settings(key: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments of httpx.Client and httpx.AsyncClient. Raises Unauthorized for what can be no key, without showing it."""
    if key and not is_sendable(key):
        raise Unauthorized("the key holds a space, a line's end or another character that no key has")
    headers = {"Authorization": _credentials(key)} if key else {}
    # A stream that waited for one of httpx's hundred connections would take its entry for silent.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT)
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
    return {"headers": headers, "timeout": timeout, "limits": limits, "trust_env": False}


def _credentials(key: str) -> str:
    """Basic where the key is not ASCII: what a Bearer may hold beyond that is not agreed on."""
    return f"Bearer {key}" if key.isascii() else f"Basic {base64.b64encode(f':{key}'.encode()).decode()}"


def sent(post: Post) -> dict[str, Any]:
    """Arguments of their ``stream``."""
    timeout = httpx.Timeout(post.read_s, connect=post.connect_s)
    return {"method": "POST", "url": post.url, "json": post.body, "headers": post.headers, "timeout": timeout}


def why(error: httpx.RequestError) -> str:
    """For `unreachable`."""
    return "timed out" if isinstance(error, httpx.TimeoutException) else str(error).rstrip(".") or type(error).__name__
