"""SmolLM2's head is its embedding: the last of two stages must have it, and the tools' wire must show the same numbers.

That an untied model keeps its own head is tests/inference/stage/test_loading.py.
"""

from __future__ import annotations

import httpx
import pytest

from meshd.cli.local_room import LocalRoom

np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = [pytest.mark.daemon, pytest.mark.model]
CAPITAL = [504, 3575, 282, 4649, 314]  # "The capital of France is"
PARIS = 7042


def test_two_stages_answer_as_one(smollm2_room: LocalRoom) -> None:
    with smollm2_room.client("n1") as client:
        (self, peers) = (client.get("/mesh/peers")[key] for key in ("self", "peers"))
        assert len({peer["arith"] for peer in (self, *peers)}) == 1
        asked = {"tokens": CAPITAL, "max_tokens": 16}
        halves = client.post("/chain", {**asked, "route": ["n1", "n2"]})
        whole = client.post("/chain", {**asked, "route": ["n3"]})
    assert halves["tokens"][0] == halves["argmax"] == PARIS
    assert halves["tokens"] == whole["tokens"]
    assert halves["logit"] == whole["logit"]
    assert halves["text"].startswith(" Paris")


def test_the_tensor_wire_gives_the_same_token_and_logit(smollm2_room: LocalRoom) -> None:
    ids = np.array([CAPITAL])
    hidden = raw(smollm2_room, "n1", "/embed", safetensors.save({"tokens": ids}))
    first = raw(smollm2_room, "n1", "/forward", hidden, "0-15")
    assert first == raw(smollm2_room, "n1", "/forward", safetensors.save({"tokens": ids}), "0..15")
    last = raw(smollm2_room, "n2", "/forward", first, "15-30")
    logits = safetensors.load(raw(smollm2_room, "n2", "/lm-head", last))["logits"]
    with smollm2_room.client("n1") as client:
        answer = client.post("/chain", {"tokens": CAPITAL, "route": ["n1", "n2"]})
    assert logits.shape == (1, len(CAPITAL), 49152)
    assert int(logits[0, -1].argmax()) == answer["argmax"] == PARIS
    assert float(logits[0, -1].max()) == answer["logit"]
    refused = httpx.post(smollm2_room.nodes["n1"].url + "/lm-head", content=last, timeout=60, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "range_not_held")
    assert refused.json()["error"]["layers"] == [0, 15]


def raw(room: LocalRoom, name: str, path: str, body: bytes, layers: str = "") -> bytes:
    headers = {"X-Layer-Range": layers} if layers else {}
    answer = httpx.post(room.nodes[name].url + path, content=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.content
