"""The dashboard's files, read once: a page, its scripts, its style. They hold nothing of the room, so they need no key.

The page may run its own scripts only and talk to this node only; everything that it shows is put into the document as text.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from meshd.api.message import Headers, Response

PREFIX: Final = "/dashboard/"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)


def assets() -> dict[str, Response]:
    """Path -> answer, ``/`` being the page."""
    found = {}
    for file in sorted(files("meshd.api").joinpath("dashboard").iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is None:
            continue
        headers: Headers = (("Content-Type", kind), ("Content-Security-Policy", _POLICY), ("Cache-Control", "no-cache"))
        path = "/" if file.name == "index.html" else PREFIX + file.name
        found[path] = Response(200, file.read_bytes(), headers)
    return found
