"""``POST /chain``: one request through the room, with its route, its recoveries and the means to resume it elsewhere.

`read` finds everything that can be wrong before any hop is asked; `answer_chain` runs what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshd.api.answer import Answer, answering, last_words
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
from meshd.api.fields import Fields
from meshd.api.message import Request, Response, Writer, json_response
from meshd.api.node import Node
from meshd.api.report import (
    answer_headers,
    recoveries_json,
    route_json,
    started_headers,
    timings_json,
    usage_json,
)
from meshd.api.sse import SSE_HEADERS, frame
from meshd.api.unsupported import refuse_unsupported
from meshd.chain.request import GenerationRequest
from meshd.directory import Directory
from meshd.errors import BadRoute, CallerError, ContextLengthExceeded, ModelChanged
from meshd.vocabulary import NodeId

MAX_HOPS = 64
MAX_DEADLINE_MS = 24 * 3600 * 1000

GET_HINT = (
    'POST a JSON body: curl -s http://{host}/chain -d \'{{"prompt": "The capital of France is", "max_tokens": 8}}\''
)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the prompt came from, as the errors name it."""

    param: str
    ids: tuple[int, ...]


def deadline_s(fields: Fields) -> float:
    """How long the client waits, in all. Raises CallerError."""
    return fields.integer("deadline_ms", 60_000, 1, MAX_DEADLINE_MS) / 1000


async def read(fields: Fields, owner: Owner, node: Node, asked: Request) -> Asked:
    """The request that the body asks for. Raises CallerError, ContextLengthExceeded, BadRoute, ModelChanged."""
    refuse_unsupported(fields)
    max_tokens = fields.integer("max_tokens", 1, 1, MAX_TOKENS)
    sampling = read_sampling(fields, node, temperature=0.0)
    stops = read_stops(fields)
    stream = fields.flag("stream")
    drafts = fields.flag("drafts", True)
    kv = fields.choice("kv", ("sticky", "stateless"))
    left_s = deadline_s(fields) - asked.waited_s
    forced = _forced(fields, owner, sampling.temperature)
    pinned = _pinned(fields, node.directory())
    source = await _prompt(fields, owner)
    room = room_for(source.ids, owner.spec, source.param)
    _check_forced(forced, max_tokens, room)
    request = GenerationRequest(
        prompt=source.ids,
        max_tokens=with_room(max_tokens, room),
        sampling=sampling,
        eos_ids=owner.text.eos_ids,
        forced=forced,
        pinned=pinned,
        sticky=node.sticky if kv is None else kv == "sticky",
        deadline_s=max(0.0, left_s),
        tenant=asked.tenant,
        drafts=drafts,
    )
    return Asked(request, stops, stream)


async def _prompt(fields: Fields, owner: Owner) -> _Source:
    names = [name for name in ("prompt", "tokens", "messages") if fields.given(name)]
    if len(names) != 1:
        found = "none" if not names else " and ".join(names)
        raise CallerError(f"give exactly one of prompt, tokens and messages; found {found}", param="prompt")
    if names == ["tokens"]:
        return _Source("tokens", fields.ids("tokens", owner.spec.vocab_size) or ())
    if names == ["messages"]:
        messages = read_messages(fields.get("messages"))
        await refuse_hopeless("".join(message["content"] for message in messages), owner, "messages")
        return _Source("messages", tuple(await owner.text.chat(messages)))
    prompt = fields.text("prompt")
    await refuse_hopeless(prompt, owner, "prompt")
    return _Source("prompt", tuple(await owner.text.encode(prompt)))


def _forced(fields: Fields, owner: Owner, temperature: float) -> tuple[int, ...]:
    """The ids that the client has already; the digest it saw with them must be ours."""
    resume = fields.object("resume")
    for given in (fields.text("digest"), resume.text("digest")):
        if given and given != owner.spec.digest:
            raise ModelChanged(
                f"the answer began with model {given[:100]}, this room serves {owner.spec.digest}: start it anew",
                param="digest",
            )
    forced = resume.ids("tokens", owner.spec.vocab_size) or ()
    if forced and temperature > 0 and not fields.given("seed"):
        raise CallerError("a sampled answer is resumed with the seed that its first event told", param="seed")
    return forced


def _check_forced(forced: tuple[int, ...], max_tokens: int, room: int) -> None:
    """Raise for ids that no answer to this request can have had: it would be taken for one that has ended."""
    if len(forced) > max_tokens:
        raise CallerError(
            f"resume.tokens has {len(forced)} ids, an answer with max_tokens {max_tokens} has no more than that",
            param="resume.tokens",
        )
    if len(forced) > room:
        raise ContextLengthExceeded(
            f"resume.tokens has {len(forced)} ids, and only {room} fit into the context after the prompt",
            param="resume.tokens",
        )


def _pinned(fields: Fields, directory: Directory) -> tuple[NodeId, ...]:
    pinned = []
    for text in fields.strings("route", MAX_HOPS):
        member = directory.find(text)
        if member is None:
            raise BadRoute(f"route: no node {text[:100]!r} is known, or more than one has this name", param="route")
        pinned.append(member.node_id)
    return tuple(pinned)


async def answer_chain(asked: Asked, owner: Owner, node: Node, request: Request, writer: Writer) -> Response | None:
    """Run it, whole or streamed."""
    if _over(asked.request):
        return await _nothing_left(asked, owner, request, writer)
    if not asked.stream:
        async with answering(node.chain, owner.text, asked.request, asked.stops) as answer:
            text = "".join([piece.text async for piece in answer])
        document = _whole(answer, asked, owner, node.directory(), text)
        return json_response(document, headers=answer_headers(answer.report, node.directory()))
    async with answering(node.chain, owner.text, asked.request, asked.stops) as answer:
        await _stream(answer, asked, owner, node, writer)
    return None


async def _stream(answer: Answer, asked: Asked, owner: Owner, node: Node, writer: Writer) -> None:
    await writer.start(200, (*SSE_HEADERS, *started_headers(answer.report, answer.waited_ms)))
    route = route_json(answer.report.route, node.directory())
    await writer.send(frame({**_head(answer.session, asked, owner), "route": route}))
    text = rest = ""
    async for piece in answer:
        text += piece.text
        if piece.choices:
            await writer.send(frame({"tokens": [choice.token for choice in piece.choices], "text": piece.text}))
        else:  # the last one
            rest = piece.text
    await writer.send(_end(rest, _whole(answer, asked, owner, node.directory(), text)))


def _end(rest: str, document: dict[str, Any]) -> bytes:
    """The last events, in one piece: who has the text that was held back but not the end would be sent that text again."""
    return (frame({"tokens": [], "text": rest}) if rest else b"") + frame(document)


def _head(session: str, asked: Asked, owner: Owner) -> dict[str, Any]:
    return {
        "id": session,
        "seed": asked.request.sampling.seed,
        "model": owner.spec.name,
        "digest": owner.spec.digest,
    }


def _whole(answer: Answer, asked: Asked, owner: Owner, directory: Directory, text: str) -> dict[str, Any]:
    report = answer.report
    first = answer.choices[0] if answer.choices else None
    completion = len(asked.request.forced) + len(answer.choices)
    return {
        **_head(answer.session, asked, owner),
        "tokens": [choice.token for choice in answer.choices],
        "text": text,
        "argmax": first.argmax if first else None,
        "logit": first.logit if first else None,
        "finish_reason": answer.finish_reason,
        "usage": usage_json(len(asked.request.prompt), completion, report.cached_tokens),
        "route": route_json(report.route, directory),
        "routing": {"mode": report.routing.mode, "signature": report.routing.signature},
        "recoveries": recoveries_json(report.recoveries, directory),
        "timings": timings_json(report.timings),
    }


def _over(request: GenerationRequest) -> bool:
    """True when what is resumed had ended: only its last event was lost."""
    return len(request.forced) >= request.max_tokens or (bool(request.forced) and request.forced[-1] in request.eos_ids)


async def _nothing_left(asked: Asked, owner: Owner, request: Request, writer: Writer) -> Response | None:
    """Nothing follows but what was held back: the last events again, without a hop."""
    rest, reason = await last_words(owner.text, asked.request, asked.stops)
    document = {
        **_head(request.request_id, asked, owner),
        "tokens": [],
        "text": rest,
        "argmax": None,
        "logit": None,
        "finish_reason": reason,
        "usage": usage_json(len(asked.request.prompt), len(asked.request.forced), 0),
        "route": [],
        "routing": {"mode": "cold", "signature": ""},
        "recoveries": [],
        "timings": {"ttft_ms": 0, "total_ms": 0, "tokens_per_s": 0},
    }
    if not asked.stream:
        return json_response(document)
    await writer.start(200, SSE_HEADERS)
    await writer.send(frame(_head(request.request_id, asked, owner)))
    await writer.send(_end(rest, document))
    return None
