"""Requests and responses as the API's handlers see them: plain data, no socket, no HTTP library.

A handler takes a `Request` and a `Writer` and either returns a whole `Response`, or streams through the writer and returns
None. Until the writer has started, any error of `meshd.errors` it raises becomes the error document with its status; afterwards
the status line is out and it becomes the last event of the stream. Both are the business of whoever called the handler.

``path`` is percent-decoded exactly once; header names are lower case.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, unquote_to_bytes

from meshd.errors import CallerError, MeshdError, NotFound

Headers = tuple[tuple[str, str], ...]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")

SECURITY_HEADERS: Headers = (
    ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
"""Sent with every answer that does not bring its own."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``client`` is the peer's address; ``tenant`` names the key it came with ("" for the room's own), so that
    cached prompts are never shared between keys; ``passed_on`` marks one that another node could not answer, and ``waited_s`` is
    how long that one had it: its deadline has not begun anew."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    body: bytes = b""
    client: str = ""
    request_id: str = ""
    tenant: str = ""
    passed_on: bool = False
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer; its length is known."""

    status: int
    body: bytes = b""
    headers: Headers = ()


class Writer(Protocol):
    """The way out for an answer that comes in pieces. Both calls wait for the client (back-pressure), with a deadline."""

    @property
    def started(self) -> bool:
        """True once the status line is out."""
        ...

    async def start(self, status: int, headers: Headers) -> None: ...

    async def send(self, data: bytes) -> None: ...


Handler = Callable[[Request, Writer], Awaitable[Response | None]]


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)  # one for every token


def dump_json(document: Any) -> bytes:
    """Compact JSON; NaN and infinities, which JSON has no spelling for, become null."""
    try:
        text = _ENCODER.encode(document)
    except ValueError:
        text = _ENCODER.encode(_finite(document))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def json_response(document: Any, *, status: int = 200, headers: Headers = ()) -> Response:
    """A JSON answer."""
    return Response(status, dump_json(document), (("Content-Type", "application/json"), *headers))


def error_response(error: MeshdError, *, beside: Mapping[str, Any] = MappingProxyType({})) -> Response:
    """The error document (with what is to stand ``beside`` the error) with its status, the headers that the error brings, and
    Retry-After where it knows when."""
    retry = getattr(error, "retry_after_s", None)
    more: Headers = (("Retry-After", str(max(1, math.ceil(retry)))),) if retry is not None else ()
    headers = (*more, *getattr(error, "headers", ()))
    return json_response({**beside, "error": error.json()}, status=error.status, headers=headers)


def leaf_error(error: BaseException) -> MeshdError | None:
    """The error of ours behind an exception: nurseries wrap what their tasks raise in groups."""
    if isinstance(error, MeshdError):
        return error
    if isinstance(error, BaseExceptionGroup):
        leaves = [leaf_error(inner) for inner in error.exceptions]
        if all(leaf is not None for leaf in leaves):
            return leaves[0]
    return None


def with_defaults(headers: Iterable[tuple[str, str]], defaults: Headers = SECURITY_HEADERS) -> Headers:
    """The headers, and each default whose name they do not have."""
    own = tuple(headers)
    names = {name.lower() for name, _ in own}
    return (*own, *(pair for pair in defaults if pair[0].lower() not in names))


def request_id(given: str | None) -> str:
    """The caller's X-Request-Id if it is tame, else a new one."""
    return given if given is not None and _REQUEST_ID.match(given) else uuid.uuid4().hex


def split_target(target: str) -> tuple[str | None, str, dict[str, str]]:
    """``(authority, path, query)`` of a request target in origin or absolute form; the path is decoded once.

    Raises NotFound for a target that cannot name anything here: another form, a broken escape, bytes that are not UTF-8,
    control characters.
    """
    authority: str | None = None
    rest = target
    if target[:7].lower() == "http://":
        authority, slash, rest = target[7:].partition("/")
        rest = slash + rest
    if not rest.startswith("/"):
        raise NotFound(f"no such path: {target[:100]!r}")
    raw_path, _, raw_query = rest.partition("#")[0].partition("?")
    if _BAD_ESCAPE.search(raw_path):
        raise NotFound(f"broken percent escape in {raw_path[:100]!r}")
    try:
        path = unquote_to_bytes(raw_path).decode("utf-8")
    except UnicodeDecodeError:
        raise NotFound(f"the path {raw_path[:100]!r} is not UTF-8") from None
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise NotFound(f"control characters in the path {raw_path[:100]!r}")
    try:
        query = dict(parse_qsl(raw_query, keep_blank_values=True, max_num_fields=64))
    except ValueError:
        raise CallerError("the query string has more than 64 fields") from None
    return authority, path, query
