"""Prompts that were computed before, as a client sees them: ``cached_tokens``, per hop and in the usage; never another key's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.client import Client
from tests import rooms
from tests.rooms import FLAGS, PATIENCE_S, expected, until

pytestmark = pytest.mark.daemon

ANNA, BORIS = "anna-1234567890abcdef", "boris-1234567890abcdef"
STORY = "Once upon a time there was a lighthouse. " * 12


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The first of two nodes with half the layers each; two people have keys to it. Its URL."""
    keys = tmp_path_factory.mktemp("keys") / "api"
    keys.write_text(f"infer {ANNA}\ninfer {BORIS}\n")
    keys.chmod(0o600)
    with LocalRoom(rooms.MODEL) as room:
        room.add("n1", "--layers", "0..15", "--api-key-file", str(keys), "--open-read", *FLAGS)
        room.add("n2", "--layers", "15..30", *FLAGS)
        room.wait(nodes=2, timeout_s=PATIENCE_S)
        yield room.nodes["n1"].url


def ask(url: str, key: str, prompt: str) -> Mapping[str, Any]:
    """The answer, the right one, once the room has forgotten the session."""
    with Client(url, key=key, timeout_s=PATIENCE_S) as client:
        answer = client.post("/chain", {"prompt": prompt, "max_tokens": 4})
        assert answer["tokens"] == expected(prompt, 4)
        until(lambda: not client.get("/status")["kv_sessions"], "the session is over")
        assert {hop["cached_tokens"] for hop in answer["route"]} == {cached(answer)}
    return answer  # type: ignore[no-any-return]  # JSON


def cached(answer: Mapping[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_key_meets_its_own_prompts_only(entry: str) -> None:
    assert cached(ask(entry, ANNA, STORY)) == 0
    until(lambda: cached(ask(entry, ANNA, STORY)) == len(STORY) - 1, "both hops have kept it")
    assert cached(ask(entry, BORIS, STORY)) == 0
    until(
        lambda: cached(ask(entry, ANNA, STORY + "And then? " * 20)) >= len(STORY) // 32 * 32,
        "a longer prompt begins so",
    )
    assert cached(ask(entry, ANNA, "Quite another story. " * 12)) == 0


def test_off() -> None:
    with LocalRoom(rooms.MODEL) as room:
        room.add("n1", "--layers", "0..30", "--prefix-cache-mb", "0", *FLAGS)
        room.wait(timeout_s=PATIENCE_S)
        for _ in range(2):
            assert cached(ask(room.nodes["n1"].url, "", STORY)) == 0
