"""Asks the daemon of this device over loopback."""

from __future__ import annotations

import json
import tomllib
import urllib.error
import urllib.request
from typing import Any

from meshd.fleet.device import places, service
from meshd.fleet.device.shell import run

ANSWER_S = 10.0
HTTP_PORT = 8090


def look() -> dict[str, Any]:
    """pid, status, self, peers and hive; a daemon that does not answer has the reason under ``silent``."""
    pid = service.running()
    answer: dict[str, Any] = {"pid": pid, "silent": "", "last_words": ""}
    if pid is None:
        return {**answer, "silent": "meshd does not run", "last_words": service.last_words()}
    try:
        peers = ask("/mesh/peers")
        answer |= {"status": ask("/status"), "hive": ask("/mesh/hive"), "self": peers["self"], "peers": peers["peers"]}
    except OSError as error:
        return {**answer, "silent": f"meshd (pid {pid}) does not answer: {error}", "last_words": service.last_words()}
    return answer


def url() -> str:
    """Where this device's own requests go. Raises OSError for a file that is no TOML."""
    try:
        given = str(tomllib.loads(places.read(places.state() / "meshd.toml")).get("http", ""))
    except tomllib.TOMLDecodeError as error:
        raise OSError(f"meshd.toml: {error}") from error
    return _url_of(given)


def _url_of(given: str) -> str:
    """Of a setting as the daemon reads it: HOST:PORT, HOST, [SIX]:PORT, SIX. What listens on every address of a kind is asked on
    loopback of that kind: a listener on [::] takes no IPv4."""
    host, port = given, ""
    if given.startswith("["):
        host, _, port = given[1:].partition("]")
    elif given.count(":") == 1:
        host, _, port = given.partition(":")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port.removeprefix(':') or HTTP_PORT}"


def ask(path: str) -> Any:
    """A document. Raises OSError (urllib's errors are)."""
    where = url() + path
    try:
        return _fetch(where, "")
    except urllib.error.HTTPError as refused:
        if refused.code != 401:
            raise
    key = run([places.meshd(), "key", "show", "--api"]).text.strip()  # an --api-key-file: loopback needs a key too
    return _fetch(where, key)


def _fetch(where: str, key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(where, headers=headers)  # noqa: S310 - http, from above
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_S) as answer:
        return json.load(answer)
