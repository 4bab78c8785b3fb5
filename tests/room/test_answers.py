"""What a whole room answers, at any of its nodes, by any of its doors."""

from __future__ import annotations

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load, save

from meshd.cli.local_room import LocalRoom
from meshd.client import RequestFailed
from tests.rooms import PROMPT, chat_ids, expected, idle, streamed, tried, until

pytestmark = pytest.mark.daemon


@pytest.mark.parametrize("entry", ["n1", "n4", "e0"])
def test_any_node_answers_with_the_same_tokens(four_halves: LocalRoom, entry: str) -> None:
    with four_halves.client(entry) as client:
        answer = client.post("/chain", {"prompt": PROMPT, "max_tokens": 8})
        again = streamed(client, max_tokens=8)
    assert answer["tokens"] == again.tokens == again.final["tokens"] == expected(PROMPT, 8)
    assert answer["text"] == again.text == bytes(answer["tokens"]).decode()
    assert answer["argmax"] == answer["tokens"][0]
    assert [hop["layers"] for hop in answer["route"]] == [[0, 15], [15, 30]]


def test_stateless_and_pinned_routes_give_the_same_tokens(four_halves: LocalRoom) -> None:
    with four_halves.client("e0") as client:
        stateless = client.post("/chain", {"prompt": PROMPT, "max_tokens": 4, "kv": "stateless"})
        pinned = client.post("/chain", {"prompt": PROMPT, "max_tokens": 4, "route": ["n3", "n2"]})
        with pytest.raises(RequestFailed) as refused:
            client.post("/chain", {"prompt": PROMPT, "route": ["n1", "n3"]})
    assert stateless["tokens"] == pinned["tokens"] == expected(PROMPT, 4)
    assert [hop["name"] for hop in pinned["route"]] == ["n3", "n2"]
    assert pinned["routing"]["mode"] == "pinned"
    assert (refused.value.http_status, refused.value.error["code"]) == (409, "bad_route")


def test_the_official_client(four_halves: LocalRoom) -> None:
    url = f"{four_halves.nodes['n2'].url}/v1"
    asked = chat_ids(("system", "Be brief."), ("user", "Hello!"))
    with openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["hash:30"]
        whole = client.chat.completions.create(
            model="hash:30",
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
            max_tokens=8,
            temperature=0,
        )
        stream = client.completions.create(model="hash:30", prompt=PROMPT, max_tokens=8, temperature=0, stream=True)
        chunks = list(stream)
    assert whole.choices[0].message.content == bytes(expected(asked, 8)).decode()
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(asked)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == bytes(expected(PROMPT, 8)).decode()


def test_a_member_without_the_model_passes_requests_on(four_halves: LocalRoom) -> None:
    node = four_halves.nodes["e0"]
    with LocalRoom("") as guest:  # another folder, no model: it learns of the room from one address
        guest.add("g0", "--join", node.mesh)
        with guest.client("g0") as client:
            until(lambda: tried(lambda: client.get("/mesh/hive")), "an answer")
            until(lambda: client.get("/mesh/hive")["nodes"] == 6, "the guest sees the room")
            seen = streamed(client, max_tokens=8)
            assert client.get("/status")["state"] == "observer"
    assert seen.tokens == expected(PROMPT, 8)


def test_what_the_room_says_of_itself(four_halves: LocalRoom) -> None:
    with httpx.Client(base_url=four_halves.nodes["e0"].url, trust_env=False) as client:
        hive = client.get("/mesh/hive").json()
        peers = client.get("/mesh/peers").json()
        assert client.get("/readyz").status_code == 200
        assert client.get("/metrics").text.count("meshd_") > 5
    assert hive["stages"] == [[0, 15, 2], [15, 30, 2]]
    assert (hive["covered"], hive["missing"], hive["single"], hive["status"]) == ([[0, 30]], [], [], "healthy")
    assert peers["self"]["role"] == "observer"
    others = {peer["name"]: peer for peer in peers["peers"] if peer["state"] != "left"}
    assert {name: peer["role"] for name, peer in others.items()} == {
        **dict.fromkeys(("n1", "n3"), "entry"),
        **dict.fromkeys(("n2", "n4"), "tail"),
    }
    assert {(peer["state"], peer["admitted"]) for peer in others.values()} == {("alive", True)}


def test_one_token_has_a_speed_and_an_entry_without_layers_says_when_it_is_ready(four_halves: LocalRoom) -> None:
    with four_halves.client("e0") as client:
        timings = client.ask(PROMPT, max_tokens=1)["timings"]
    assert timings["tokens_per_s"] == pytest.approx(1000 / timings["total_ms"], rel=0.2)
    ready = [event["layers"] for event in four_halves.nodes["e0"].events() if event["ev"] == "ready"]
    assert ready == [None]


def test_a_client_that_leaves_ends_its_answer_everywhere(four_halves: LocalRoom) -> None:
    for entry in ("e0", "n1"):
        with four_halves.client(entry) as client:
            pieces = client.stream(PROMPT, max_tokens=4000)
            while not next(pieces).tokens:
                pass
            pieces.close()
        until(lambda: not list(idle(four_halves)), "nothing runs and nothing is remembered")


def test_the_tensor_wire_enters_and_leaves_between_nodes(four_halves: LocalRoom) -> None:
    def call(name: str, path: str, body: bytes, **headers: str) -> bytes:
        url = four_halves.nodes[name].url + path
        answer = httpx.post(url, content=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.content

    ids = save({"tokens": np.array(list(PROMPT.encode()))})
    embedded = call("n1", "/embed", ids)
    half = call("n3", "/forward", embedded)
    assert half == call("n1", "/forward", ids)
    whole = call(
        "n4", "/forward", call("n2", "/forward", half, **{"X-Layer-Range": "15-20"}), **{"X-Layer-Range": "20..30"}
    )
    logits = load(call("n2", "/lm-head", whole))["logits"]
    assert int(logits[-1].argmax()) == expected(PROMPT, 1)[0]
    refused = httpx.post(four_halves.nodes["n2"].url + "/embed", content=ids, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["layers"]) == (409, [15, 30])
