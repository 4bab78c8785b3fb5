"""What both kinds of client have in common in front of httpx."""

from __future__ import annotations

from typing import Any

import httpx

from meshd.client.answer import CONNECT_S, Post


def settings(key: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments of httpx.Client and httpx.AsyncClient."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"headers": headers, "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S), "trust_env": False}


def sent(post: Post) -> dict[str, Any]:
    """Arguments of their ``stream``."""
    timeout = httpx.Timeout(post.read_s, connect=post.connect_s)
    return {"method": "POST", "url": post.url, "json": post.body, "headers": post.headers, "timeout": timeout}


def why(error: httpx.TransportError) -> str:
    """For `unreachable`."""
    return "timed out" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
