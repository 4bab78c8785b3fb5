"""The official client against the server, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from meshd.errors import StageUnavailable
from meshd.vocabulary import LayerRange
from tests.api.rig import SPEC, Rig, client, events_of, served
from tests.fakes.chain import SESSION, FakeChain
from tests.fakes.text import EOS

HI: Any = [{"role": "user", "content": "hi"}]


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@contextmanager
def official(rig: Rig) -> Iterator[openai.OpenAI]:
    with (
        served(rig) as url,
        openai.DefaultHttpxClient(trust_env=False) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as api,
    ):
        yield api


def test_chat_whole() -> None:
    rig = Rig(FakeChain((*ids("Paris"), EOS)))
    with official(rig) as api:
        answer = api.chat.completions.create(model="tiny", messages=HI, seed=4, temperature=0)
    assert answer.id == f"chatcmpl-{SESSION}"
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "Paris")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    (request,) = rig.chain.requests
    assert bytes(request.prompt) == b"user: hi\nassistant: "
    assert request.max_tokens == SPEC.context - len(request.prompt)
    assert (request.sampling.seed, request.sampling.temperature) == (4, 0)
    assert (request.deadline_s, request.token_deadline_s) == (None, 60.0)


def test_chat_stream() -> None:
    rig = Rig(FakeChain(ids("h\u00e9llo"), step=2))
    with official(rig) as api:
        chunks = list(
            api.chat.completions.create(
                model="tiny", messages=HI, stream=True, max_completion_tokens=50, stream_options={"include_usage": True}
            )
        )
    *body, usage = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == "h\u00e9llo"
    assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in body)
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_whole_and_streamed() -> None:
    rig = Rig(FakeChain(ids("a" * 40)))
    with official(rig) as api:
        whole = api.completions.create(model="tiny", prompt="hi")
        stream = list(api.completions.create(model="tiny", prompt=[104, 105], stream=True, max_tokens=4))
        listed = api.completions.create(model="tiny", prompt=["hi"], max_tokens=1)
    assert (whole.object, whole.choices[0].text, whole.choices[0].finish_reason) == (
        "text_completion",
        "a" * 16,
        "length",
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "aaaa"
    assert [chunk.choices[0].finish_reason for chunk in stream] == [None] * 4 + ["length"]
    assert listed.choices[0].text == "a"
    assert [bytes(request.prompt) for request in rig.chain.requests] == [b"hi"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_across_tokens(stream: bool) -> None:
    rig = Rig(FakeChain(ids("one END two")))
    with official(rig) as api:
        if stream:
            chunks = list(api.chat.completions.create(model="tiny", messages=HI, stop=["END"], stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            answer = api.chat.completions.create(model="tiny", messages=HI, stop="END")
            text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert (text, reason) == ("one ", "stop")
    assert rig.chain.running == 0


def test_chat_logprobs() -> None:
    rig = Rig(FakeChain((*ids("ab"), EOS)))
    with official(rig) as api:
        answer = api.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
        chunks = list(api.chat.completions.create(model="tiny", messages=HI, logprobs=True, stream=True))
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in told.content] == [
        ("a", -0.5, [97]),
        ("b", -0.5, [98]),
    ]
    assert [(top.token, top.logprob) for top in told.content[0].top_logprobs] == [("a", -0.5), ("b", -1.5)]
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry.token for each in streamed for entry in each.content or []] == ["a", "b"]
    assert [request.sampling.logprobs for request in rig.chain.requests] == [2, 0]


def test_completion_logprobs() -> None:
    rig = Rig(FakeChain(ids("ab")))
    with official(rig) as api:
        answer = api.completions.create(model="tiny", prompt="hi", logprobs=1, max_tokens=2)
    told = answer.choices[0].logprobs
    assert told is not None
    assert (told.tokens, told.token_logprobs, told.text_offset) == (["a", "b"], [-0.5, -0.5], [0, 1])
    assert told.top_logprobs == [{"a": -0.5}, {"b": -0.5}]


def test_models() -> None:
    with official(Rig()) as api:
        assert [model.id for model in api.models.list()] == ["tiny"]
        assert api.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve("other")


def test_content_parts_and_developer_messages() -> None:
    rig = Rig(FakeChain(ids("ok")))
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    with official(rig) as api:
        api.chat.completions.create(model="tiny", messages=messages, user="me", metadata={"a": "b"}, n=1)
    assert bytes(rig.chain.requests[0].prompt) == b"system: be brief\nuser: hi\nassistant: "


OF_OTHER_SERVERS: dict[str, Any] = {
    "stop_token_ids": [5],
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "structured_outputs": {"choice": ["a", "b"]},
    "logits_processors": ["x"],
    "guided_json": {"type": "object"},
    "min_tokens": 4,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "include_stop_str_in_output": True,
    "documents": [{"text": "x"}],
    "typical_p": 0.5,
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
}
"""Each with a value that would change the answer."""

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"n": 2}, "n"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    *(({name: value}, name) for name, value in OF_OTHER_SERVERS.items()),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
]


@pytest.mark.parametrize(("body", "param"), UNSUPPORTED)
def test_what_would_change_the_answer_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    rig = Rig(FakeChain(ids("ok")))
    with client(rig) as http:
        answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, "stream": True, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    assert not rig.chain.requests


@pytest.mark.parametrize("path", ["/chain", "/v1/completions"])
@pytest.mark.parametrize(("body", "param"), UNSUPPORTED[:-2])  # but for the messages
def test_so_it_is_wherever_one_asks(path: str, body: dict[str, Any], param: str) -> None:
    rig = Rig(FakeChain(ids("ok")))
    with client(rig) as http:
        error = http.post(path, json={"prompt": "hi", **body}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert not rig.chain.requests


def test_what_changes_nothing_is_ignored() -> None:
    harmless: dict[str, Any] = {
        **dict.fromkeys(OF_OTHER_SERVERS),
        "stop_token_ids": [],
        "chat_template_kwargs": {},
        "add_generation_prompt": True,
        "continue_final_message": False,
        "include_stop_str_in_output": False,
        "typical_p": 1.0,
        "mirostat": 0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0,
        "min_tokens": 0,
        "tools": [],
        "n": 1,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "logprobs": None,
        "parallel_tool_calls": True,
        "store": True,
        "service_tier": "auto",
        "whatever": {"x": 1},
    }
    with client(Rig(FakeChain(ids("ok")))) as http:
        answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, **harmless})
        chain = http.post("/chain", json={"model": "tiny", "messages": HI, "max_tokens": 2, **harmless})
    assert answer.json()["choices"][0]["message"]["content"] == chain.json()["text"] == "ok"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("value", [0, -1, 10**12, "5", True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a48_bad_numbers(path: str, name: str, value: object) -> None:
    with client(Rig(FakeChain(ids("ok")))) as http:
        answer = http.post(path, json={"model": "tiny", "messages": HI, "prompt": "hi", name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_an_unknown_model_is_404() -> None:
    with official(Rig()) as api, pytest.raises(openai.NotFoundError) as caught:
        api.chat.completions.create(model="gpt-4", messages=HI)
    assert caught.value.code == "model_not_found"


# --- how a stream ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a46_success_ends_with_one_finish_reason_and_done(path: str) -> None:
    with client(Rig(FakeChain(ids("okay")))) as http:
        answer = http.post(path, json={"messages": HI, "prompt": "hi", "stream": True})
    *events, done = events_of(answer.text)
    assert done == "[DONE]"
    reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a46_failure_ends_with_an_error_and_nothing_else(path: str) -> None:
    lost = StageUnavailable([LayerRange(15, 30)])
    with client(Rig(FakeChain(ids("abcdef"), error=lost, error_at=3))) as http:
        answer = http.post(path, json={"messages": HI, "prompt": "hi", "stream": True})
    *events, last = [json.loads(event) for event in events_of(answer.text)]
    assert last["error"]["code"] == "stage_unavailable"
    assert all(event["choices"][0]["finish_reason"] is None for event in events)
    assert "[DONE]" not in answer.text


def test_a46_the_official_client_raises_what_the_stream_says() -> None:
    lost = StageUnavailable([LayerRange(15, 30)])
    with official(Rig(FakeChain(ids("abcdef"), error=lost, error_at=3))) as api:
        stream = api.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match=r"15\.\.30 unavailable"):
            list(stream)


def test_a46_a_bad_request_is_a_status_before_any_event() -> None:
    lost = StageUnavailable([LayerRange(15, 30)])
    with official(Rig(FakeChain(error=lost))) as api:
        with pytest.raises(openai.BadRequestError):
            api.chat.completions.create(model="tiny", messages=HI, stream=True, top_p=7)
        with pytest.raises(openai.InternalServerError) as caught:
            api.chat.completions.create(model="tiny", messages=HI, stream=True)
    assert caught.value.status_code == 503


def test_a44_a_character_of_several_tokens_comes_whole() -> None:
    rig = Rig(FakeChain(ids("\U0001f980x")))
    with client(rig) as http:
        body = {"prompt": "hi", "stream": True, "max_tokens": 5}
        whole = [json.loads(event) for event in events_of(http.post("/v1/completions", json=body).text)[:-1]]
        body["max_tokens"] = 2
        cut = [json.loads(event) for event in events_of(http.post("/v1/completions", json=body).text)[:-1]]
    assert [event["choices"][0]["text"] for event in whole] == ["\U0001f980", "x", ""]
    assert "".join(event["choices"][0]["text"] for event in cut) == "\U0001f980".encode()[:2].decode(errors="replace")
