"""Rooms behind a mesh key: links are mutual TLS, another key's nodes do not exist, and callers need the API key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from meshd.cli.local_room import LocalRoom
from meshd.client import Client, RequestFailed
from meshd.identity import mesh_key
from tests import rooms
from tests.rooms import FLAGS, PATIENCE_S, PROMPT, expected, meshd, noise, tried, until

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three key files: the room's, its copy made from the line that `key new` prints, a stranger's; and an API key file."""
    folder = tmp_path_factory.mktemp("keys")
    made = meshd("key", "new", "--mesh-key", str(folder / "first"))
    assert made.returncode == 0, made.stderr
    line = made.stdout.strip().split()
    assert line[:3] == ["meshd", "key", "add"]
    added = meshd(*line[1:], "--mesh-key", str(folder / "second"))
    assert added.returncode == 0, added.stderr
    assert meshd("key", "new", "--mesh-key", str(folder / "strange")).returncode == 0
    (folder / "api").write_text("infer ask-me-anything-1234567890\nread look-but-do-not-touch-1234\n")
    (folder / "api").chmod(0o600)
    return {name: folder / name for name in ("first", "second", "strange", "api")}


@pytest.fixture(scope="module")
def keyed(keys: dict[str, Path]) -> Iterator[LocalRoom]:
    with LocalRoom(rooms.MODEL) as room:
        room.add("n1", "--layers", "0..15", "--mesh-key", str(keys["first"]), *FLAGS)
        room.add("n2", "--layers", "15..30", "--mesh-key", str(keys["second"]), *FLAGS)
        room.add("x1", "--layers", "15..30", "--mesh-key", str(keys["strange"]), *FLAGS)
        room.add("p1", "--layers", "15..30", *FLAGS)  # no key at all
        room.wait(nodes=2, timeout_s=PATIENCE_S, at=["n1", "n2"])
        yield room


def test_the_line_makes_a_room(keyed: LocalRoom) -> None:
    with keyed.client("n1") as client:
        answer = client.post("/chain", {"prompt": PROMPT, "max_tokens": 8})
    assert answer["tokens"] == expected(PROMPT, 8)
    assert [hop["name"] for hop in answer["route"]] == ["n1", "n2"]


def test_strangers_do_not_exist(keyed: LocalRoom) -> None:
    for name in ("x1", "p1"):
        with keyed.client(name) as client:
            until(lambda client=client: (tried(lambda: client.get("/status")) or {}).get("state") == "ready", name)  # type: ignore[misc]  # bound above
            assert client.get("/mesh/peers")["peers"] == []
            with pytest.raises(RequestFailed) as failure:
                client.post("/chain", {"prompt": PROMPT})
            assert failure.value.error["missing"] == [[0, 15]]
    for name in ("n1", "n2"):
        with keyed.client(name) as client:
            assert len(client.get("/mesh/peers")["peers"]) == 1
            assert client.get("/mesh/hive")["stages"] == [[0, 15, 1], [15, 30, 1]]
    with keyed.client("n1") as client:
        # The strangers' datagrams came, and were counted.
        until(lambda: client.get("/status")["counters"]["rejected_datagrams"] > 0, "datagrams of strangers are counted")
    assert "Traceback" not in "".join(noise(keyed, name) for name in keyed.nodes)


def test_a_key_file_makes_even_this_device_a_stranger(keyed: LocalRoom, keys: dict[str, Path]) -> None:
    keyed.add("k1", "--capacity-mb", "0", "--mesh-key", str(keys["first"]), "--api-key-file", str(keys["api"]))
    url = keyed.nodes["k1"].url
    with keyed.client("k1") as client:
        until(lambda: tried(lambda: client.get("/healthz")), "k1 runs")
    derived = mesh_key.load(keys["first"]).api_key()

    def status(path: str, key: str | None, *, basic: bool = False, body: object = None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key and not basic else {}
        auth = ("", key) if key and basic else None
        method = "POST" if body else "GET"
        with httpx.Client(trust_env=False, timeout=60) as client:
            return client.request(method, url + path, json=body, headers=headers, auth=auth).status_code

    until(lambda: status("/readyz", None) == 200, "k1 knows the room")
    ask = {"prompt": PROMPT}
    assert status("/status", None) == 401
    assert status("/status", "wrong") == 401
    assert status("/chain", None, body=ask) == 401
    assert status("/chain", "ask-me-anything-1234567890", body=ask) == 200
    assert status("/chain", "look-but-do-not-touch-1234", body=ask) == 403
    assert status("/status", "look-but-do-not-touch-1234") == 200
    assert status("/chain", derived, body=ask) == 200
    assert status("/chain", derived, basic=True, body=ask) == 200
    with Client(url) as client, pytest.raises(RequestFailed, match="meshd key show --api"):
        client.get("/status")
