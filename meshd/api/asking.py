"""From a request's body to a `GenerationRequest`: what `/chain` and `/v1/*` have in common.

Pure but for asking the text side for token ids. Everything that can be wrong with a request is found here, before any hop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshd.api.fields import Fields, checked_text, shown
from meshd.api.node import Node
from meshd.chain.request import GenerationRequest
from meshd.errors import CallerError, ContextLengthExceeded, NotReady, UnsupportedParameter
from meshd.inference.engine import Sampling
from meshd.inference.text import Text
from meshd.vocabulary import ModelSpec

MAX_TOKENS = 1_000_000  # more than any context: above it the number is a mistake, not a wish
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
_CHARS_PER_TOKEN = 8  # twice what usual text has
_CUT_TOKENS = 16  # so many more than the whole text has may its cut beginning have
ROLES = ("system", "user", "assistant", "developer")


@dataclass(frozen=True, slots=True)
class Owner:
    """What this node needs to own a request."""

    text: Text
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be run. ``max_tokens`` in it is cut to the context. ``stops`` are the API's business."""

    request: GenerationRequest
    stops: tuple[str, ...]
    stream: bool


def owner(node: Node) -> Owner | None:
    """This node's text side and model, if it can own requests now."""
    text, spec = node.text(), node.spec()
    return Owner(text, spec) if text is not None and spec is not None else None


def not_ready(node: Node) -> NotReady:
    """Why this node cannot own requests."""
    facts = node.facts()
    why = f"{facts.state}: {facts.reason}" if facts.reason else facts.state
    return NotReady(f"this node cannot take requests now ({why}) and knows no other that can")


def read_sampling(fields: Fields, node: Node, *, temperature: float, logprobs: int | None = None) -> Sampling:
    """The sampling parameters; a seed that is not given is drawn here, so that it can be told and used again."""
    low, high = -(2**63), 2**63 - 1
    seed = fields.integer("seed", 0, low, high) if fields.given("seed") else node.rng.getrandbits(32)
    return Sampling(
        temperature=fields.number("temperature", temperature, 0.0, 10.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        top_k=fields.integer("top_k", 0, 0, MAX_TOKENS),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=seed % 2**63,
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 10.0),
        logprobs=logprobs,
    )


def read_stops(fields: Fields) -> tuple[str, ...]:
    """Stop strings; empty ones would stop everything and are refused."""
    stops = fields.strings("stop", MAX_STOPS)
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise CallerError(
                f"each stop string must have 1 to {MAX_STOP_CHARS} characters", param=fields.param("stop")
            )
    return stops


def room_for(prompt: Sequence[int], spec: ModelSpec, param: str) -> int:
    """How many tokens an answer to ``prompt`` may have. Raises ContextLengthExceeded, or CallerError for no prompt."""
    if not prompt:
        raise CallerError(f"{param} is empty: there is nothing to continue", param=param)
    if len(prompt) >= spec.context:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and {spec.name} a context of {spec.context}: nothing can follow it",
            param=param,
        )
    return spec.context - len(prompt)


async def refuse_hopeless(content: str, owner: Owner, param: str) -> None:
    """Raise ContextLengthExceeded for a text whose beginning alone is too long. Texts are tokenized one after the other, so
    one of megabytes would make every other answer wait."""
    context = owner.spec.context
    if len(content) <= _CHARS_PER_TOKEN * context:
        return
    begin = await owner.text.encode(content[: _CHARS_PER_TOKEN * context])
    if len(begin) > context + _CUT_TOKENS:
        raise ContextLengthExceeded(
            f"the prompt has more than {len(begin) - _CUT_TOKENS} tokens and {owner.spec.name} a context of {context}",
            param=param,
        )


def read_messages(value: object) -> list[Mapping[str, Any]]:
    """Chat messages with their content as plain text. Raises CallerError, or UnsupportedParameter for images and tools."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise CallerError(f"messages must be a list of 1 to {MAX_MESSAGES} messages", param="messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(item: object, param: str) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise CallerError(f"{param} must be an object with role and content, not {shown(item)}", param=param)
    role = item.get("role")
    if role in ("tool", "function") or item.get("tool_calls") or item.get("function_call"):
        raise UnsupportedParameter(f"{param}: tools are not supported", param=param)
    if role not in ROLES:
        raise CallerError(f"{param}.role must be one of {', '.join(ROLES)}, not {shown(role)}", param=f"{param}.role")
    content = item.get("content")
    if content is None and role == "assistant":
        content = ""
    return {"role": "system" if role == "developer" else role, "content": _content(content, f"{param}.content")}


def _content(content: object, param: str) -> str:
    """A string, or a list of text parts joined."""
    if not isinstance(content, list):
        return checked_text(content, param)
    texts = []
    for index, part in enumerate(content):
        name = f"{param}[{index}]"
        if not isinstance(part, dict):
            raise CallerError(f"{name} must be an object with a type, not {shown(part)}", param=name)
        if part.get("type") != "text":
            raise UnsupportedParameter(
                f"{name}: only text parts are supported, not {shown(part.get('type'))}", param=name
            )
        texts.append(checked_text(part.get("text"), f"{name}.text"))
    return "".join(texts)


def with_room(max_tokens: int | None, room: int) -> int:
    """The most tokens an answer may have: what is asked for, or all that fits."""
    return room if max_tokens is None else min(max_tokens, room)
