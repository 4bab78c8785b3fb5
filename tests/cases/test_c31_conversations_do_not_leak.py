"""A conversation must leave nothing behind for the next one: A in five turns, then B, then A again, over one connection."""

from __future__ import annotations

import httpx
import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import chat_ids, expected

pytestmark = pytest.mark.daemon


def test_every_answer_is_that_of_a_fresh_room(four_halves: LocalRoom) -> None:
    with httpx.Client(base_url=four_halves.nodes["n1"].url, timeout=60, trust_env=False) as client:

        def answer(messages: list[tuple[str, str]]) -> str:
            said = [{"role": role, "content": content} for role, content in messages]
            body = {"model": "hash:30", "messages": said, "max_tokens": 6, "temperature": 0}
            response = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            asked = chat_ids(*messages)
            assert response["usage"]["prompt_tokens"] == len(asked)
            text: str = response["choices"][0]["message"]["content"]
            assert text == bytes(expected(asked, 6)).decode()
            return text

        talk: list[tuple[str, str]] = []
        for turn in range(5):
            talk.append(("user", f"question {turn}"))
            talk.append(("assistant", answer(talk)))
        answer([("user", "something else entirely")])
        for turn in range(1, 10, 2):
            assert answer(talk[:turn]) == talk[turn][1]
