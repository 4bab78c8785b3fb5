"""What ``GET /`` shows: what this is and where to look. No script, nothing of the room, so that it needs no key."""

from __future__ import annotations

from typing import Final

_ROWS: Final = (
    ("GET /healthz, /readyz", "this process is up; all layers are covered"),
    ("GET /status", "this node"),
    ("GET /mesh/peers, /mesh/hive, /mesh/model", "who is in the room, which layers it holds, of what model"),
    ("GET /v1/routing", "the routes and what is known of them"),
    ("GET /v1/models", "what can be asked"),
    ("POST /v1/chat/completions, /v1/completions", "OpenAI's interface"),
    ("POST /chain", "one request, with its route and its recoveries"),
    ("POST /embed, /forward, /lm-head", "this node's layers, safetensors in and out"),
    ("GET /events, /metrics", "the event log as server-sent events; Prometheus"),
    ("POST /admin/drain, /admin/resume", "hand over running work; take work again"),
)

FRONT_PAGE_POLICY: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

FRONT_PAGE: Final = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>meshd</title><h1>meshd</h1>"
    "<p>A room of devices that serves one language model together. This is one of its nodes.</p><table>"
    + "".join(f"<tr><td><code>{paths}</code><td>{what}" for paths, what in _ROWS)
    + "</table><p>From another device a key is needed: <code>meshd key show --api</code> prints it.</html>\n"
).encode()
