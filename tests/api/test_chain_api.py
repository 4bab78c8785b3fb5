from __future__ import annotations

import json
from itertools import product
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.chain.request import Recovery
from meshd.errors import Busy, DeadlineExceeded, StageUnavailable
from meshd.vocabulary import LayerRange
from tests.api.rig import SPEC, Rig, client, events_of
from tests.fakes.chain import N1, N2, SESSION, FakeChain
from tests.fakes.text import EOS


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def ask(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/chain", json={"prompt": "hi", **body})


def test_a_whole_answer_has_every_field() -> None:
    recovery = Recovery(LayerRange(15, 30), N2, N1, "reset", 212.4, 31, True)
    rig = Rig(FakeChain(ids(" Paris."), recoveries=(recovery,)))
    with client(rig) as http:
        answer = ask(http, max_tokens=6, seed=1)
    assert answer.status_code == 200
    assert answer.json() == {
        "id": SESSION,
        "model": "tiny",
        "digest": "d1",
        "seed": 1,
        "tokens": list(b" Paris"),
        "text": " Paris",
        "argmax": 32,
        "logit": 17.5,
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "route": [
            {"node": N1, "name": "n1", "layers": [0, 15], "compute_ms": 8.12, "wire_ms": 0.4, "cached_tokens": 2},
            {"node": N2, "name": "n2", "layers": [15, 30], "compute_ms": 9.0, "wire_ms": 0.5, "cached_tokens": 2},
        ],
        "routing": {"mode": "exploit", "signature": "tiny|n1[0:15]->n2[15:30]"},
        "recoveries": [
            {
                "layers": [15, 30],
                "from": "n2",
                "to": "n1",
                "reason": "reset",
                "stall_ms": 212.4,
                "replayed_tokens": 31,
                "exact": True,
            }
        ],
        "timings": {"ttft_ms": 31.0, "total_ms": 62.0, "tokens_per_s": 32.1},
    }
    assert answer.headers["x-mesh-route"] == "n1[0:15]->n2[15:30]"
    assert answer.headers["x-mesh-mode"] == "exploit"
    assert "ttft;dur=31.0" in answer.headers["server-timing"]


def test_a_stream_begins_with_the_seed_and_ends_with_the_whole_answer() -> None:
    rig = Rig(FakeChain(ids("héllo")))
    with client(rig) as http:
        whole = ask(http, max_tokens=50, seed=3).json()
        stream = ask(http, max_tokens=50, seed=3, stream=True)
    first, *middle, last = (json.loads(event) for event in events_of(stream.text))
    assert first.items() >= {"id": SESSION, "seed": 3, "model": "tiny", "digest": "d1"}.items()
    assert [token for piece in middle for token in piece["tokens"]] == list("héllo".encode())
    assert "".join(piece["text"] for piece in middle) == "héllo"
    assert last == whole
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-mesh-route"] == "n1[0:15]->n2[15:30]"


def test_a_seed_is_drawn_and_told() -> None:
    rig = Rig(FakeChain(ids("abc")))
    with client(rig) as http:
        first, second = (ask(http, temperature=0.5).json()["seed"] for _ in range(2))
    assert first != second
    assert [request.sampling.seed for request in rig.chain.requests] == [first, second]


def test_an_end_token_ends_the_text_but_is_among_the_tokens() -> None:
    rig = Rig(FakeChain((*ids("ok"), EOS, *ids("never"))))
    with client(rig) as http:
        answer = ask(http, max_tokens=50).json()
    assert (answer["text"], answer["tokens"], answer["finish_reason"]) == ("ok", [*b"ok", EOS], "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 3, 50])
@pytest.mark.parametrize("stoppable", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_there(stream: bool, step: int, stoppable: bool) -> None:
    rig = Rig(FakeChain(ids("one END two"), step=step, stoppable=stoppable))
    with client(rig) as http:
        response = ask(http, max_tokens=50, stop=["END", "nothing"], stream=stream)
    pieces = [json.loads(event) for event in events_of(response.text)] if stream else [response.json()]
    answer = pieces[-1]
    assert (answer["text"], answer["finish_reason"]) == ("one ", "stop")
    assert answer["tokens"] == list(b"one END")
    if stream:
        assert "".join(piece["text"] for piece in pieces[1:-1]) == "one "
    assert [hop["name"] for hop in answer["route"]] == ["n1", "n2"]
    assert (rig.chain.stopped, rig.chain.running) == (int(stoppable), 0)


def test_half_a_stop_string_at_the_end_is_text() -> None:
    with client(Rig(FakeChain(ids("one EN")))) as http:
        answer = ask(http, max_tokens=50, stop="END", stream=True)
    pieces = [json.loads(event) for event in events_of(answer.text)]
    assert "".join(piece["text"] for piece in pieces[1:-1]) == pieces[-1]["text"] == "one EN"
    assert pieces[-1]["finish_reason"] == "length"


@settings(max_examples=25, deadline=None)
@given(text=st.text(min_size=1, max_size=12), cut=st.integers(1, 40), step=st.integers(1, 4))
def test_deltas_join_to_the_one_shot_decode_even_when_cut_inside_a_character(text: str, cut: int, step: int) -> None:
    raw = text.encode()[:cut]
    with client(Rig(FakeChain(tuple(raw), step=step))) as http:
        whole = ask(http, max_tokens=90).json()
        stream = ask(http, max_tokens=90, stream=True)
    pieces = [json.loads(event) for event in events_of(stream.text)]
    deltas = [piece["text"] for piece in pieces[1:-1]]
    assert whole["text"] == "".join(deltas) == raw.decode(errors="replace")
    assert not any("\ufffd" in delta for delta in deltas[:-1])


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [[], ["zz"], [" w\u00f6"]])
def test_a_resumed_stream_goes_on_where_the_other_broke_off(stop: list[str]) -> None:
    raw = "h\u00e4llo w\u00f6rld".encode()
    rig = Rig(FakeChain(tuple(raw)))
    with client(rig) as http:
        pieces = [json.loads(e) for e in events_of(ask(http, max_tokens=50, stop=stop, stream=True).text)]
        middle, whole = pieces[1:-1], pieces[-1]
        for cut in range(len(middle)):
            had = [token for piece in middle[:cut] for token in piece["tokens"]]
            text = "".join(piece["text"] for piece in middle[:cut])
            resumed = ask(http, max_tokens=50, stop=stop, resume={"tokens": had}, digest="d1").json()
            assert had + resumed["tokens"] == whole["tokens"]
            assert text + resumed["text"] == whole["text"]
            assert resumed["finish_reason"] == whole["finish_reason"]
            assert resumed["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("stop", [[], ["Nzz"], ["N"], ["vN"], ["\u00f6x"]])
@pytest.mark.parametrize("raw", [b"n}jvN", "n}jv\u00f6".encode(), b"n}jv\xf0\x9f"])
def test_who_lost_the_last_event_only_is_told_what_was_held_back(raw: bytes, stop: list[str]) -> None:
    with client(Rig(FakeChain(tuple(raw)))) as http:
        body = {"max_tokens": len(raw), "stop": stop}
        *pieces, whole = [json.loads(e) for e in events_of(ask(http, stream=True, **body).text)][1:]
        had = [piece for piece in pieces if piece["tokens"]]
        ids_had, text = [token for piece in had for token in piece["tokens"]], "".join(piece["text"] for piece in had)
        resumed = ask(http, resume={"tokens": ids_had}, **body).json()
        *again, last = [
            json.loads(e) for e in events_of(ask(http, resume={"tokens": ids_had}, stream=True, **body).text)
        ][1:]
    assert ids_had == whole["tokens"]
    for told, reason in (
        (resumed["text"], resumed["finish_reason"]),
        ("".join(piece["text"] for piece in again), last["finish_reason"]),
    ):
        assert (text + told, reason) == (whole["text"], whole["finish_reason"])


@pytest.mark.parametrize("where", [{"digest": "other"}, {"resume": {"tokens": [104], "digest": "other"}}])
def test_another_model_cannot_be_resumed(where: dict[str, Any]) -> None:
    with client(Rig(FakeChain(ids("abc")))) as http:
        answer = ask(http, **where)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_changed")


def test_a_sampled_answer_is_resumed_with_its_seed_only() -> None:
    with client(Rig(FakeChain(ids("abc")))) as http:
        refused = ask(http, temperature=1, resume={"tokens": [97]}, max_tokens=3)
        taken = ask(http, temperature=1, resume={"tokens": [97]}, max_tokens=3, seed=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")
    assert taken.json()["text"] == "bc"


@pytest.mark.parametrize(("had", "reason"), [([97, 98], "length"), ([97, EOS], "stop")])
def test_resuming_what_had_ended_gives_its_end_without_a_hop(had: list[int], reason: str) -> None:
    rig = Rig(FakeChain(ids("abc")))
    with client(rig) as http:
        answer = ask(http, resume={"tokens": had}, max_tokens=2).json()
        stream = ask(http, resume={"tokens": had}, max_tokens=2, stream=True)
    assert (answer["tokens"], answer["finish_reason"]) == ([], reason)
    assert json.loads(events_of(stream.text)[-1])["finish_reason"] == reason
    assert not rig.chain.requests


# --- what cannot be right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({"max_tokens": value}, "max_tokens") for value in (0, -1, 10**12, 1e12, "5", True, [1], 1.5)),
        *(({"temperature": value}, "temperature") for value in (-1, "1", True)),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"kv": "maybe"}, "kv"),
        ({"stream": "yes"}, "stream"),
        ({"drafts": 1}, "drafts"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"route": [1]}, "route"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x", "tokens": [1]}, "prompt"),
        ({"prompt": None, "tokens": []}, "tokens"),
        ({"prompt": None, "tokens": [1, "2"]}, "tokens"),
        ({"prompt": None, "tokens": [257]}, "tokens"),
        ({"prompt": None, "tokens": [-1]}, "tokens"),
        ({"prompt": None, "tokens": [True]}, "tokens"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": None, "messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"prompt": None, "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"resume": {"tokens": [999]}}, "resume.tokens"),
        ({"resume": 5}, "resume"),
        ({"resume": {"tokens": [97, 98]}}, "resume.tokens"),
        ({"resume": {"tokens": [97] * 5}, "max_tokens": 4}, "resume.tokens"),
        ({"resume": {"tokens": [97] * 99}, "max_tokens": 500}, "resume.tokens"),
    ],
)
def test_a_wrong_value_is_400_and_names_its_parameter(body: dict[str, Any], param: str) -> None:
    rig = Rig(FakeChain(ids("abc")))
    with client(rig) as http:
        answer = http.post("/chain", content=json.dumps({"prompt": "hi", **body}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not rig.chain.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[1]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_proper_json_is_400(body: bytes) -> None:
    with client(Rig(FakeChain(ids("abc")))) as http:
        answer = http.post("/chain", content=body)
        assert answer.status_code == 400
        assert http.get("/healthz").status_code == 200


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_nesting_that_can_be_parsed_but_hardly_walked_again_is_400() -> None:
    names = ("stop", "max_tokens", "temperature", "stream", "resume", "messages", "tools", "whatever")
    with client(Rig(FakeChain(ids("abc")))) as http:
        for name, depth in product(names, (64, 900, *range(960, 980, 3), 2000)):
            body = b'{"prompt": "hi", "%s": %s%s}' % (name.encode(), b"[" * depth, b"]" * depth)
            answer = http.post("/chain", content=body)
            assert answer.status_code == 400, (name, depth)
            assert "at most 64" in answer.json()["error"]["message"]


def test_nesting_within_the_limit_is_of_no_concern() -> None:
    wide = [[i] for i in range(1000)]
    with client(Rig(FakeChain(ids("abc")))) as http:
        assert ask(http, whatever=nested(63), other=wide).json()["text"] == "a"


def test_content_type_does_not_matter_without_an_origin() -> None:
    with client(Rig(FakeChain(ids("abc")))) as http:
        answer = http.post("/chain", content=b'{"prompt": "hi"}', headers={"Content-Type": "text/plain"})
    assert answer.json()["text"] == "a"


def test_a48_a_prompt_longer_than_the_context_never_reaches_a_hop() -> None:
    rig = Rig(FakeChain(ids("abc")))
    with client(rig) as http:
        for length in (SPEC.context, SPEC.context + 1, 9000):
            answer = ask(http, prompt="x" * length)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not rig.chain.requests


@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_a48_of_a_hopeless_prompt_only_the_beginning_is_read(name: str) -> None:
    rig = Rig(FakeChain(ids("abc")))
    text = "x" * 1_000_000
    with client(rig) as http:
        body = {"prompt": text} if name == "prompt" else {"messages": [{"role": "user", "content": text}]}
        answers = [http.post("/chain", json=body)]
        answers.append(http.post("/v1/completions" if name == "prompt" else "/v1/chat/completions", json=body))
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", name)
    assert rig.text is not None
    assert rig.text.longest < 10 * SPEC.context


def test_a48_an_answer_stops_at_the_end_of_the_context() -> None:
    rig = Rig(FakeChain(ids("abcdefgh" * 20)))
    with client(rig) as http:
        answer = ask(http, prompt="x" * (SPEC.context - 2), max_tokens=100).json()
    assert (len(answer["tokens"]), answer["finish_reason"]) == (2, "length")


# --- what the room says -----------------------------------------------------------------------------------------------


def test_pins_may_be_names_or_ids() -> None:
    rig = Rig(FakeChain(ids("abc")))
    with client(rig) as http:
        assert ask(http, route=["n1", N2], kv="stateless", drafts=False).status_code == 200
        unknown = ask(http, route=["n1", "n9"])
    assert rig.chain.requests[0].pinned == (N1, N2)
    assert not rig.chain.requests[0].sticky
    assert not rig.chain.requests[0].drafts
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (409, "bad_route")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StageUnavailable([LayerRange(15, 30)]), 503, "stage_unavailable"),
        (Busy("full", retry_after_s=1.5), 429, "busy"),
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error_at", [None, 0])
def test_a_failure_before_the_first_token_is_a_status(
    error: Any, status: int, code: str, stream: bool, error_at: int | None
) -> None:
    rig = Rig(FakeChain(ids("abc"), error=error, error_at=error_at))
    with client(rig) as http:
        answer = ask(http, max_tokens=3, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    if status == 503:
        assert answer.json()["error"]["missing"] == [[15, 30]]
        assert answer.json()["error"]["message"] == "stage 15..30 unavailable: no live replica"
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_a_failure_after_the_first_token_is_one_event_and_the_end() -> None:
    rig = Rig(FakeChain(ids("abcdef"), error=StageUnavailable([LayerRange(15, 30)]), error_at=3))
    with client(rig) as http:
        answer = ask(http, max_tokens=6, stream=True)
    events = [json.loads(event) for event in events_of(answer.text)]
    assert answer.status_code == 200
    assert [event.get("text") for event in events[1:-1]] == ["a", "b", "c"]
    assert events[-1]["error"]["code"] == "stage_unavailable"
    assert events[-1]["error"]["missing"] == [[15, 30]]


def test_get_says_how_to_post() -> None:
    with client(Rig()) as http:
        answer = http.get("/chain")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "curl" in answer.json()["error"]["message"]
