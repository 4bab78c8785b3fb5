"""OpenAI's chat and text completions, whole and streamed, and the list of models.

Owns the shapes of the answers. A stream is: pieces, exactly one chunk with a ``finish_reason``, the usage if asked for, then
``[DONE]``; after a failure one event with the error and no ``[DONE]``. What can be asked for is `openai_read`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshd.api.answer import Answer, answering
from meshd.api.asking import Owner
from meshd.api.message import Response, Writer, json_response
from meshd.api.node import Node
from meshd.api.openai_read import Wanted
from meshd.api.report import answer_headers, started_headers, usage_json
from meshd.api.sse import DONE, SSE_HEADERS, frame
from meshd.api.views import Hive
from meshd.errors import ModelNotFound
from meshd.inference.engine import Choice
from meshd.inference.text import Text


def models_json(hives: Sequence[Hive]) -> dict[str, Any]:
    """``GET /v1/models``."""
    return {"object": "list", "data": [_model(hive) for hive in hives]}


def model_json(hives: Sequence[Hive], name: str) -> dict[str, Any]:
    """``GET /v1/models/{id}``. Raises ModelNotFound."""
    for hive in hives:
        if hive.model == name:
            return _model(hive)
    raise ModelNotFound(f"the model {name[:200]!r} is not served here", param="model")


def _model(hive: Hive) -> dict[str, Any]:
    return {
        "id": hive.model,
        "object": "model",
        "created": 0,
        "owned_by": "mesh",
        "digest": hive.digest,
        "num_layers": hive.num_layers,
    }


@dataclass(frozen=True, slots=True)
class _Shape:
    """What differs between the two kinds of completion."""

    kind: str
    chunk_kind: str
    prefix: str
    chat: bool

    def choice(self, text: str, logprobs: Any, finish: str | None, *, first: bool = False) -> dict[str, Any]:
        """A choice of a stream's chunk."""
        common = {"index": 0, "logprobs": logprobs, "finish_reason": finish}
        if not self.chat:
            return {**common, "text": text}
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if first or text:
            delta["content"] = text
        return {**common, "delta": delta}

    def whole(self, text: str, logprobs: Any, finish: str) -> dict[str, Any]:
        """The choice of a whole answer."""
        common = {"index": 0, "logprobs": logprobs, "finish_reason": finish}
        if not self.chat:
            return {**common, "text": text}
        return {**common, "message": {"role": "assistant", "content": text, "refusal": None}}


CHAT = _Shape("chat.completion", "chat.completion.chunk", "chatcmpl-", chat=True)
COMPLETION = _Shape("text_completion", "text_completion", "cmpl-", chat=False)


async def answer_openai(shape: _Shape, wanted: Wanted, owner: Owner, node: Node, writer: Writer) -> Response | None:
    """Run a request and tell its answer in ``shape``."""
    asked = wanted.asked
    telling = _Telling(shape, wanted, owner)
    if asked.stream:
        async with answering(node.chain, owner.text, asked.request, asked.stops) as answer:
            await writer.start(200, (*SSE_HEADERS, *started_headers(answer.report, answer.waited_ms)))
            await telling.stream(answer, writer)
        return None
    async with answering(node.chain, owner.text, asked.request, asked.stops) as answer:
        document = await telling.whole(answer)
    return json_response(document, headers=answer_headers(answer.report, node.directory()))


class _Telling:
    """Makes one answer's documents."""

    def __init__(self, shape: _Shape, wanted: Wanted, owner: Owner) -> None:
        self._shape = shape
        self._wanted = wanted
        self._owner = owner
        self._created = int(time.time())
        self._logprobs = _Logprobs(owner.text, chat=shape.chat)

    async def whole(self, answer: Answer) -> dict[str, Any]:
        pieces = [piece async for piece in answer]
        text = "".join(piece.text for piece in pieces)
        logprobs = await self._told_logprobs(answer.choices)
        choice = self._shape.whole(text, logprobs, answer.finish_reason)
        return {**self._head(answer, self._shape.kind), "choices": [choice], "usage": self._usage(answer)}

    async def stream(self, answer: Answer, writer: Writer) -> None:
        if self._shape.chat:
            await writer.send(frame(self._chunk(answer, self._shape.choice("", None, None, first=True))))
        async for piece in answer:
            logprobs = await self._told_logprobs(piece.choices) if piece.choices else None
            if piece.text or logprobs:
                await writer.send(frame(self._chunk(answer, self._shape.choice(piece.text, logprobs, None))))
        await writer.send(frame(self._chunk(answer, self._shape.choice("", None, answer.finish_reason))))
        if self._wanted.include_usage:
            last = {**self._head(answer, self._shape.chunk_kind), "choices": [], "usage": self._usage(answer)}
            await writer.send(frame(last))
        await writer.send(DONE)

    def _chunk(self, answer: Answer, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(answer, self._shape.chunk_kind), "choices": [choice]}
        return {**chunk, "usage": None} if self._wanted.include_usage else chunk

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        return {
            "id": self._shape.prefix + answer.session,
            "object": kind,
            "created": self._created,
            "model": self._owner.spec.name,
            "system_fingerprint": self._owner.spec.digest,
        }

    def _usage(self, answer: Answer) -> dict[str, Any]:
        prompt = len(self._wanted.asked.request.prompt)
        return usage_json(prompt, len(answer.choices), answer.report.cached_tokens)

    async def _told_logprobs(self, choices: Sequence[Choice]) -> dict[str, Any] | None:
        if not self._wanted.logprobs:
            return None
        ends = self._wanted.asked.request.eos_ids
        return await self._logprobs.told([choice for choice in choices if choice.token not in ends])


@dataclass(slots=True)
class _Logprobs:
    """Log probabilities with each token's own text. Half a character alone has no text of its own: then ``bytes`` is null."""

    text: Text
    chat: bool
    _strings: dict[int, str] = field(default_factory=dict)
    _offset: int = 0

    async def told(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return await (self._chat(choices) if self.chat else self._completion(choices))

    async def _chat(self, choices: Sequence[Choice]) -> dict[str, Any]:
        content = []
        for choice in choices:
            entry = await self._entry(choice.token, choice.logprob)
            entry["top_logprobs"] = [await self._entry(token, logprob) for token, logprob in choice.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    async def _completion(self, choices: Sequence[Choice]) -> dict[str, Any]:
        tokens, offsets, tops = [], [], []
        for choice in choices:
            string = await self._string(choice.token)
            tokens.append(string)
            offsets.append(self._offset)
            self._offset += len(string)
            tops.append({await self._string(token): logprob for token, logprob in choice.top})
        return {
            "tokens": tokens,
            "token_logprobs": [choice.logprob for choice in choices],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    async def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        string = await self._string(token)
        whole = "\ufffd" not in string
        # OpenAI's clients want a number: -9999 is what they are sent for "not among the alternatives".
        return {
            "token": string,
            "logprob": -9999.0 if logprob is None else logprob,
            "bytes": list(string.encode()) if whole else None,
        }

    async def _string(self, token: int) -> str:
        if token not in self._strings:
            self._strings[token] = await self.text.decode([token])
        return self._strings[token]
