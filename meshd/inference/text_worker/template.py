"""A model's chat template, run in jinja2's immutable sandbox with the conventions of the Hub.

Owns rendering only: tokens are `tokenizer.py`'s. The time limit is the daemon's: whoever runs a stranger's program cannot stop
it from inside. Templates see ``messages``, ``add_generation_prompt``, the special tokens by name, ``raise_exception``,
``strftime_now``, ``tojson`` and loop controls; ``tools`` and ``documents`` are none.

Errors: CallerError with the template's own words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshd.errors import CallerError

MAX_CHARS = 16 << 20
ROLES = ("system", "developer", "user", "assistant", "tool")


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template; ``special`` are the special tokens by name (``bos_token`` ...)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._special = dict(special)
        self._knows_developer = "developer" in source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CallerError(f"the model's chat template is damaged: {error}", param="messages") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text of the conversation. Raises CallerError."""
        prepared = [self._renamed(message) for message in messages]
        parts: list[str] = []
        size = 0
        try:
            for part in self._generate(prepared, add_generation_prompt):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARS:
                    raise CallerError(f"the chat template makes more than {MAX_CHARS} characters", param="messages")
        except CallerError:
            raise
        except Exception as error:  # a template is a program of strangers: anything can go wrong in it
            raise CallerError(f"the chat template refuses these messages: {error}", param="messages") from error
        return "".join(parts)

    def _generate(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> Iterator[str]:
        return self._template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special,
        )

    def _renamed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message["role"]
        return {**message, "role": "system" if role == "developer" and not self._knows_developer else role}


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a known role and one string each. Raises CallerError naming what is wrong."""
    if not messages:
        raise CallerError("messages is empty", param="messages")
    return [
        {**message, "role": _role(message, at), "content": _content(message, at)} for at, message in enumerate(messages)
    ]


def _role(message: Mapping[str, Any], at: int) -> str:
    role = message.get("role")
    if role not in ROLES:
        raise CallerError(f"messages[{at}].role is not one of {', '.join(ROLES)}", param="messages")
    return str(role)


def _content(message: Mapping[str, Any], at: int) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise CallerError(f"messages[{at}].content is neither a string nor a list of parts", param="messages")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise CallerError(f"messages[{at}].content has a part that is not text", param="messages")
        texts.append(part["text"])
    return "".join(texts)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """In the argument order of the Hub's own filter. jinja2's would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
