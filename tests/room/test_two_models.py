"""Two models in one room: each node serves its own, and passes on what is asked for the other."""

from __future__ import annotations

from functools import partial

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.client import Client
from meshd.inference.hash_stage import reference
from tests.rooms import PATIENCE_S, PROMPT, tried, until

pytestmark = pytest.mark.daemon

SIZES = {"n1": 4, "n2": 6}


def lists_both(client: Client) -> bool:
    return len((tried(lambda: client.get("/v1/models")) or {"data": []})["data"]) == len(SIZES)


def test_either_node_answers_for_both() -> None:
    with LocalRoom("", common=("--capacity-mb", "100")) as room:
        for name, layers in SIZES.items():
            room.add(name, "--model", f"hash:{layers},layer_mb=1", "--layers", f"0..{layers}")
        for name, own in SIZES.items():
            with room.client(name) as client:
                until(partial(lists_both, client), f"{name} lists both", PATIENCE_S)
                for layers in SIZES.values():
                    answer = client.post("/chain", {"prompt": PROMPT, "max_tokens": 4, "model": f"hash:{layers}"})
                    assert answer["tokens"] == reference(tuple(PROMPT.encode()), 4, layers)
                assert client.get("/mesh/hive")["num_layers"] == own
