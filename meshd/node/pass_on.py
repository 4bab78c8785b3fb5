"""Lets another entry of the room answer a request that this node cannot own, over the link between them.

The stream's first message is the request; the answer comes back ``whole``, or as ``start`` (status and headers) and ``part``
messages, as the other side's handler makes them. Leaving either side cancels the other: the client's disconnect travels all the
way. The node that was asked checks the key; the link proves that it is a member.

The link is watched meanwhile, and an entry that is silent is given up as soon as a hop of a route would be: a machine that lost
its power tells nobody. The client's deadline is the asked node's to keep, and goes on counting at the entry. An entry that is
lost in the middle of a stream is not replaced: what the client has of it, and what it resumes with, is the client's to say.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import trio

from meshd.api.app import App
from meshd.api.chain_api import MAX_DEADLINE_MS
from meshd.api.message import Headers, Request, Response, Writer, error_response, leaf_error
from meshd.api.sse import send_error
from meshd.chain.evidence import SILENCE_S
from meshd.chain.session import PAUSED_S
from meshd.directory import Directory, Member
from meshd.errors import BadFrame, Busy, DeadlineExceeded, LinkLost, MeshdError, NoOtherEntry, NotReady, PeerError
from meshd.links.fields import integer_untrusted
from meshd.links.wire import Link, Links, Message, Stream
from meshd.vocabulary import NodeId

KIND: Final = "http"
LATE_S: Final = 0.25  # the entry's own word that the time is over may still come
# Nothing else of a request's headers concerns its owner.
_FORWARDED: Final = ("content-type", "accept", "x-request-id", "x-mesh-beat")


class Passer:
    """Implements `meshd.api.node.PassOn`. Entries are tried nearest first; one that cannot be reached, or takes nothing now (it
    has begun to drain, or is full), costs only time. One whose link broke is tried once more at the end: it may have been the
    link alone."""

    def __init__(self, links: Links, directory: Callable[[], Directory]) -> None:
        self._links = links
        self._directory = directory

    async def __call__(
        self, request: Request, writer: Writer, *, digest: str, deadline_s: float | None
    ) -> Response | None:
        wait_s = math.inf if deadline_s is None else deadline_s + LATE_S
        with trio.move_on_after(wait_s):
            return await self._ask_each(request, writer, digest)
        raise DeadlineExceeded(f"no entry of this room answered within the {deadline_s:g} s that the request gives")

    async def _ask_each(self, request: Request, writer: Writer, digest: str) -> Response | None:
        began = trio.current_time()
        last: MeshdError | None = None
        busy: Busy | None = None
        again = set[NodeId]()
        left = deque(member.node_id for member in entries(self._directory(), digest))
        while left:
            entry = left.popleft()
            try:
                link = await self._links.get(entry)
                waited_s = request.waited_s + trio.current_time() - began
                return await _hand_over(link, replace(request, waited_s=waited_s), writer)
            except (PeerError, NotReady, Busy) as error:
                if writer.started:  # the client has tokens already, which only its own resume tells another entry
                    raise NotReady(f"the entry that answered in this node's place is gone: {error.message}") from error
                last = error
                busy = error if isinstance(error, Busy) else busy
                if isinstance(error, LinkLost) and entry not in again:
                    again.add(entry)
                    left.append(entry)
        if busy is not None:  # tells when to come again
            raise busy
        if isinstance(last, PeerError):
            raise NotReady(f"this node lets another entry answer, and that one did not: {last.message}")
        if last is not None:
            raise NotReady(last.message)
        raise NoOtherEntry("no node of this room can take requests for this model now")


def entries(directory: Directory, digest: str) -> list[Member]:
    """Who can own a request for the model, nearest first. ``digest`` "": for the model of this node, if it has one; whoever
    names none expects what this node would have answered, and not another model's words."""
    ours = directory.me.advert.digest if directory.me is not None else ""
    digest = digest or ours
    found = [
        member
        for member in directory.peers
        if member.advert.entry and member.advert.digest and digest in ("", member.advert.digest)
        if _present(member) and _trusted(member, ours)
    ]
    return sorted(found, key=lambda member: (member.last_resort, member.rtt_ms or 0.0, member.node_id))


def _present(member: Member) -> bool:
    return member.state in ("alive", "suspect") and not member.advert.draining and member.incompatible is None


def _trusted(member: Member, ours: str) -> bool:
    """An entry runs what it can itself, so its layers must be proven; those of another model cannot be judged here."""
    return member.advert.layers is None or member.proven(judged=member.advert.digest == ours)


async def _hand_over(link: Link, request: Request, writer: Writer) -> Response | None:
    headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
    head = {
        "method": request.method,
        "path": request.path,
        "headers": headers,
        "id": request.request_id,
        "tenant": request.tenant,
        "waited_ms": int(request.waited_s * 1000),
    }
    async with link.watch():
        stream = await link.open(Message(KIND, head, request.body))
        try:  # our side stays open: its cancelling is how the entry learns that the client left
            while (message := await _next(link, stream)) is not None:
                if message.kind == "whole":
                    status, pairs = _start_untrusted(message.head)
                    return Response(status, message.body, pairs)
                if message.kind == "start":
                    await writer.start(*_start_untrusted(message.head))
                else:
                    await writer.send(message.body)
            return None
        finally:
            stream.cancel()


async def _next(link: Link, stream: Stream) -> Message | None:
    """As `Stream.receive`, and raises LinkLost once nothing is heard of the peer any more. A pause of this process is not its
    silence."""
    since = trio.current_time()
    while True:
        silent_at = max(since, link.last_heard) + SILENCE_S
        with trio.move_on_at(silent_at):
            return await stream.receive()
        now = trio.current_time()
        if now > silent_at + PAUSED_S:
            since = now
        elif link.last_heard + SILENCE_S <= now:
            raise LinkLost(f"{link.peer[:8]} has been silent for {SILENCE_S:g} s")


def _start_untrusted(head: Mapping[str, Any]) -> tuple[int, Headers]:
    status, pairs = head.get("status"), head.get("headers")
    if not isinstance(status, int) or not 200 <= status <= 599 or not isinstance(pairs, list) or len(pairs) > 32:
        raise BadFrame("a passed-on answer without a status")
    found = []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise BadFrame("a passed-on answer with damaged headers")
        if any(ord(char) < 32 for text in pair for char in text):
            raise BadFrame("a passed-on answer with control characters in its headers")
        found.append((pair[0], pair[1]))
    return status, tuple(found)


# --- the entry's side -------------------------------------------------------------------------------------------------


class _StreamWriter:
    """A `Writer` whose client is at the other end of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._started = False

    @property
    def started(self) -> bool:
        return self._started

    async def start(self, status: int, headers: Headers) -> None:
        self._started = True
        await self._stream.send(Message("start", {"status": status, "headers": [list(pair) for pair in headers]}))

    async def send(self, data: bytes) -> None:
        await self._stream.send(Message("part", body=data))


async def take_over(app: App, peer: NodeId, message: Message, stream: Stream) -> None:
    """Answer a request that ``peer`` passed on. Cancelled when the peer leaves; raises MeshdError when that is found out by
    sending to it."""
    try:
        await _answer(app, peer, message, stream)
    except ExceptionGroup as group:  # of the nursery; for a peer that is gone nobody looks for a fault here
        raise leaf_error(group) or group from None


async def _answer(app: App, peer: NodeId, message: Message, stream: Stream) -> None:
    writer = _StreamWriter(stream)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_when_left, stream, nursery.cancel_scope)
        try:
            response = await app.take_over(_request_untrusted(message, peer), writer)
        except Exception as error:
            known = leaf_error(error)
            if known is None:
                raise
            if isinstance(known, NotReady | Busy) and not writer.started:  # another entry may do better: no answer
                stream.fail(known)
                nursery.cancel_scope.cancel()
                return
            response = await _told(known, writer)
        if response is not None:
            head = {"status": response.status, "headers": [list(pair) for pair in response.headers]}
            await stream.send(Message("whole", head, response.body))
        await stream.end()
        nursery.cancel_scope.cancel()


async def _told(error: MeshdError, writer: Writer) -> Response | None:
    """An error as an answer, or as the last event of one that was begun."""
    if not writer.started:
        return error_response(error)
    await send_error(writer, error)
    return None


async def _cancel_when_left(stream: Stream, scope: trio.CancelScope) -> None:
    try:
        while await stream.receive() is not None:
            pass
    except MeshdError:
        scope.cancel()


def _request_untrusted(message: Message, peer: NodeId) -> Request:
    head = message.head
    texts = {key: head.get(key) for key in ("method", "path", "id", "tenant")}
    headers = head.get("headers")
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(headers, dict):
        raise BadFrame("a passed-on request that is not one")
    return Request(
        method=str(texts["method"]),
        path=str(texts["path"]),
        headers={name: str(headers[name]) for name in _FORWARDED if name in headers},
        body=message.body,
        client=f"node {peer}",
        request_id=str(texts["id"]),
        tenant=str(texts["tenant"]),
        passed_on=True,
        waited_s=integer_untrusted(head, "waited_ms", 0, MAX_DEADLINE_MS, default=0) / 1000,
    )
