"""Who may call at all: the Host allow-list, the Origin check, and the rights that a key carries.

Pure. The first two keep web pages out: a page in a browser of this device can send requests to loopback addresses, directly
(then they carry an Origin or say that they are cross-site) or through a name it points here (then the Host is foreign). The
keys keep other people out; only their hashes are kept, compared in constant time.

Rights: ``read`` sees the room, ``infer`` may also ask it, ``admin`` may also drain it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from meshd.api.message import Headers, Request
from meshd.errors import Forbidden, Unauthorized, UsageError

_FORWARDING = ("forwarded", "x-forwarded-for", "x-real-ip")


class Right(IntEnum):
    """What a route needs; each includes those before it."""

    NONE = 0
    READ = 1
    INFER = 2
    ADMIN = 3


class KeyRefused(Unauthorized):
    """No key or a wrong one; carries the challenge that makes browsers and curl ask for it."""

    headers: Headers = (("WWW-Authenticate", 'Basic realm="meshd", charset="UTF-8"'), ("WWW-Authenticate", "Bearer"))


# --- web pages --------------------------------------------------------------------------------------------------------


def check_host(request: Request, authority: str | None, names: frozenset[str]) -> None:
    """Raise Forbidden unless the Host (or the absolute target's authority) is loopback, an IP literal or one of ``names``.

    A request without any (HTTP/1.0) passes: browsers always send one.
    """
    for host in (authority, request.headers.get("host")):
        if host is not None and not _own_host(host, names):
            raise Forbidden(
                f"host {host[:100]!r} is not this node; use its IP address, or start it with --advertise {host[:100]}"
            )


def _own_host(host: str, names: frozenset[str]) -> bool:
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def check_origin(request: Request) -> None:
    """Raise Forbidden for what a foreign web page sends; a same-origin page must call JSON JSON, which forms cannot."""
    headers = request.headers
    origin = headers.get("origin")
    if origin is None:
        # Browsers leave Origin out of plain GETs, but say where they come from; a followed link is harmless.
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            raise Forbidden("requests from other web sites are refused")
        return
    host = headers.get("host", "").lower()
    scheme, _, rest = origin.lower().partition("://")
    if scheme not in ("http", "https") or not host or rest != host:
        raise Forbidden(f"origin {origin[:100]!r} is not this node; web pages of other sites may not call it")
    if request.method not in ("GET", "HEAD"):
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Forbidden("a request with an Origin must say Content-Type: application/json")


# --- keys -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's hash and what it may do. ``tenant`` keeps the cached prompts of different keys apart ("": the room's own)."""

    digest: bytes
    right: Right
    tenant: str = ""

    @classmethod
    def of(cls, key: str, right: Right, *, own: bool = False) -> ApiKey:
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        return cls(digest, right, "" if own else digest[:8].hex())


def parse_key_file(text: str, source: str) -> list[ApiKey]:
    """The lines ``infer|read|admin KEY`` of a key file; blank lines and ``#`` comments are skipped. Raises UsageError."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        word, _, key = line.strip().partition(" ")
        key = key.strip()
        if not word or word.startswith("#"):
            continue
        rights = {"read": Right.READ, "infer": Right.INFER, "admin": Right.ADMIN}
        if word not in rights or not key or any(char.isspace() for char in key):
            raise UsageError(
                f"{source} line {number}: expected 'infer KEY', 'read KEY' or 'admin KEY' (--api-key-file)"
            )
        if len(key) < 16:
            raise UsageError(
                f"{source} line {number}: a key shorter than 16 characters can be guessed (--api-key-file)"
            )
        keys.append(ApiKey.of(key, rights[word]))
    return keys


@dataclass(frozen=True, slots=True)
class Access:
    """The rules. ``trust_loopback``: callers on this device need no key (unless a key file is given). ``open_read``: nobody
    needs a key to see the room. ``open_all``: no key exists at all and the owner said so (``--insecure-lan``)."""

    keys: tuple[ApiKey, ...] = ()
    trust_loopback: bool = True
    open_read: bool = False
    open_all: bool = False

    def tenant(self, request: Request, needs: Right) -> str:
        """Whose request this is. Raises KeyRefused without a known key, Forbidden when the key has not the right."""
        if needs is Right.NONE:
            return ""
        given = _given_key(request.headers)
        key = self._find(given) if given is not None else None
        if key is not None and key.right >= needs:
            return key.tenant
        if self.open_all or (self.open_read and needs is Right.READ):
            return ""
        if self.trust_loopback and _is_local(request):
            return ""
        if key is not None:
            raise Forbidden(f"this key may not do that: it needs the right {needs.name.lower()!r}")
        problem = "a key is needed" if given is None else "this key is not known"
        raise KeyRefused(
            f"{problem}: send 'Authorization: Bearer KEY'; 'meshd key show --api' on any device of the room prints it"
        )

    def _find(self, given: str) -> ApiKey | None:
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self.keys:  # every key is compared, so that the time taken tells nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _given_key(headers: Mapping[str, str]) -> str | None:
    """The key of ``Authorization: Bearer KEY``, or the password of Basic: "", which is nobody's, if that cannot be read."""
    scheme, _, value = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(value.strip(), validate=True).decode("utf-8", "surrogateescape")
        except (binascii.Error, ValueError):
            return ""
        return pair.partition(":")[2]
    return None


def _is_local(request: Request) -> bool:
    """True for a caller on this device; not for one whom a proxy on this device forwards."""
    try:
        loopback = ipaddress.ip_address(request.client).is_loopback
    except ValueError:
        return False
    return loopback and not any(name in request.headers for name in _FORWARDING)


@dataclass(frozen=True, slots=True)
class Guards:
    """Everything that is checked before a request's body is read."""

    access: Access = field(default_factory=Access)
    names: frozenset[str] = frozenset()  # lower-case host names of this node

    def page(self, request: Request, authority: str | None) -> None:
        """The checks against web pages, which hold on every route."""
        check_host(request, authority, self.names)
        check_origin(request)


def host_names(names: Iterable[str]) -> frozenset[str]:
    """The names of this node in the form that `Guards` compares, each also under ``.local``."""
    plain = {name.strip().lower().removesuffix(".") for name in names if name.strip()}
    return frozenset(plain | {f"{name}.local" for name in plain if "." not in name})
