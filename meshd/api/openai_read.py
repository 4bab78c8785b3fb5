"""What OpenAI's clients ask for, read into a `GenerationRequest`.

What would change the answer and is not supported is refused by name; harmless unknown fields are ignored. Pure but for asking
the text side for ids.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from meshd.api.asking import (
    MAX_TOKENS,
    Asked,
    Owner,
    read_messages,
    read_sampling,
    read_stops,
    refuse_hopeless,
    room_for,
    with_room,
)
from meshd.api.fields import Fields, shown, token_ids
from meshd.api.node import Node
from meshd.api.unsupported import refuse_unsupported
from meshd.chain.request import GenerationRequest
from meshd.errors import CallerError, UnsupportedParameter

TOKEN_DEADLINE_S = 60.0
MAX_LOGPROBS = 20
COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request and how its answer is to be told. ``logprobs``: told per token."""

    asked: Asked
    include_usage: bool
    logprobs: bool


async def read_chat(fields: Fields, owner: Owner, node: Node, tenant: str) -> Wanted:
    """``POST /v1/chat/completions``."""
    refuse_unsupported(fields)
    logprobs = fields.flag("logprobs")
    alternatives = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if alternatives and not logprobs:
        raise CallerError("top_logprobs needs logprobs: true", param="top_logprobs")
    messages = read_messages(fields.get("messages"))
    max_tokens = _max_tokens(fields, "max_completion_tokens", "max_tokens")
    await refuse_hopeless("".join(message["content"] for message in messages), owner, "messages")
    wish = _Wish("messages", lambda: owner.text.chat(messages), max_tokens, alternatives if logprobs else None)
    return await _wanted(fields, owner, node, tenant, wish)


async def read_completion(fields: Fields, owner: Owner, node: Node, tenant: str) -> Wanted:
    """``POST /v1/completions``."""
    refuse_unsupported(fields)
    alternatives = fields.integer("logprobs", 0, 0, MAX_LOGPROBS) if fields.given("logprobs") else None
    max_tokens = _max_tokens(fields, "max_tokens", "max_completion_tokens")
    prompt = _one_prompt(fields.get("prompt"))

    async def encode() -> Sequence[int]:
        if isinstance(prompt, list):
            return token_ids(prompt, "prompt", owner.spec.vocab_size)
        await refuse_hopeless(prompt, owner, "prompt")
        return await owner.text.encode(prompt)

    wish = _Wish("prompt", encode, COMPLETION_TOKENS if max_tokens is None else max_tokens, alternatives)
    return await _wanted(fields, owner, node, tenant, wish)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the two kinds of completion spell differently. ``param`` is where the prompt came from."""

    param: str
    encode: Callable[[], Awaitable[Sequence[int]]]
    max_tokens: int | None
    logprobs: int | None


async def _wanted(fields: Fields, owner: Owner, node: Node, tenant: str, wish: _Wish) -> Wanted:
    sampling = read_sampling(fields, node, temperature=1.0, logprobs=wish.logprobs)
    stops = read_stops(fields)
    stream = fields.flag("stream")
    include_usage = fields.object("stream_options").flag("include_usage")
    prompt = tuple(await wish.encode())
    room = room_for(prompt, owner.spec, wish.param)
    request = GenerationRequest(
        prompt=prompt,
        max_tokens=with_room(wish.max_tokens, room),
        sampling=sampling,
        eos_ids=owner.text.eos_ids,
        sticky=node.sticky,
        deadline_s=None,
        token_deadline_s=TOKEN_DEADLINE_S,
        tenant=tenant,
    )
    return Wanted(Asked(request, stops, stream), include_usage, wish.logprobs is not None)


def _max_tokens(fields: Fields, *names: str) -> int | None:
    """The first of the two names that is given; both are checked."""
    given = [fields.integer(name, 0, 1, MAX_TOKENS) for name in names if fields.given(name)]
    return given[0] if given else None


def _one_prompt(value: object) -> str | list[object]:
    """A string or a list of ids; a list of one of them counts as that one."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return Fields({"prompt": value}).text("prompt")
    if isinstance(value, list):
        if any(isinstance(item, str | list) for item in value):
            raise UnsupportedParameter(
                "several prompts in one request are not supported; send one each", param="prompt"
            )
        return value
    raise CallerError(f"prompt must be a string or a list of token ids, not {shown(value)}", param="prompt")
