"""Prompts of different lengths at once, one of them over early: each is answered as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from meshd.cli.local_room import LocalRoom

pytestmark = [pytest.mark.daemon, pytest.mark.model]
REQUESTS = {
    "short": {"prompt": "One two three", "max_tokens": 16},
    "long": {"prompt": "The lighthouse keeper climbed the stairs. " * 8, "max_tokens": 4},
    "middle": {"prompt": "Water boils at one hundred degrees, and ice melts at", "max_tokens": 12},
}


def test_company_changes_no_token_and_no_logit(smollm2_room: LocalRoom) -> None:
    def ask(name: str, answers: dict[str, tuple[list[int], float]]) -> None:
        with smollm2_room.client("n1") as client:
            answer: Mapping[str, Any] = client.post("/chain", {**REQUESTS[name], "route": ["n1", "n2"]})
        answers[name] = (answer["tokens"], answer["logit"])

    alone: dict[str, tuple[list[int], float]] = {}
    for name in REQUESTS:
        ask(name, alone)
    together: dict[str, tuple[list[int], float]] = {}
    threads = [threading.Thread(target=ask, args=(name, together)) for name in REQUESTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone
