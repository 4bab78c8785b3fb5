"""The client for asyncio and trio: what `entries` and `answer` say, done with httpx.AsyncClient.

Its streams are async generators. One that is left before its end is closed when it is collected; who wants its request ended at
once closes it (``async with contextlib.aclosing(room.stream(…)) as pieces``).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, MutableSequence, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import httpx

from meshd.client.answer import SILENCE_S, Answer, Patience, Piece, Post, Race
from meshd.client.entries import DEFAULT_URL, Call, Read, document, text
from meshd.client.over_httpx import entries_of, sent, settings, why
from meshd.client.talk import Message, Turn


class AsyncClient:
    """`meshd.client.Client` with ``await``; any number of tasks may use one at a time."""

    def __init__(
        self,
        urls: Sequence[str] | str = DEFAULT_URL,
        *,
        key: str | None = None,
        timeout_s: float = 60.0,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._entries = entries_of(urls)
        self._patience = Patience(timeout_s, silence_s)
        self._http = httpx.AsyncClient(**settings(key, timeout_s))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def prefer(self, url: str) -> None:
        """Begin at this one of the entries next time."""
        self._entries.prefer(url)

    # --- documents ----------------------------------------------------------------------------------------------------

    async def get(self, path: str) -> Any:
        """The JSON document at ``path`` from the first entry that answers. Raises RequestFailed, NoEntry."""
        return await self._call("GET", path, None, document)

    async def text(self, path: str) -> str:
        """The body at ``path`` as it stands (``/metrics``)."""
        return await self._call("GET", path, None, text)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST and return the JSON answer."""
        return await self._call("POST", path, body or {}, document)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[str, int, bytes], Read]
    ) -> Read:
        call = Call(self._entries, path, read)
        for url in call.urls():
            try:
                response = await self._http.request(method, url, json=body)
                call.answered(response.status_code, response.content)
            except httpx.RequestError as error:
                call.lost(why(error))
        return call.result()

    # --- answers ------------------------------------------------------------------------------------------------------

    async def ask(self, prompt: str | None = None, **body: Any) -> Mapping[str, Any]:
        """The whole answer object of ``POST /chain`` (prompt, messages, max_tokens, seed …)."""
        final: Mapping[str, Any] = {}
        async with aclosing(self.stream(prompt, **body)) as pieces:
            async for piece in pieces:
                final = piece.final or final
        return final

    async def chat(self, messages: MutableSequence[Message], said: str, **body: Any) -> AsyncGenerator[Piece, None]:
        """Say something and stream the answer. Both are appended to ``messages``, the answer as far as it came."""
        turn = Turn(messages, said)
        try:
            async with aclosing(self.stream(messages=list(messages), **body)) as pieces:
                async for piece in pieces:
                    turn.heard(piece)
                    yield piece
        finally:
            turn.over()

    async def stream(
        self, prompt: str | None = None, *, patience_s: float = 10.0, **body: Any
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of an answer as they come. A dead entry costs a pause, not a token: the stream goes on at the next one
        for as long as ``patience_s`` passes without any progress. Raises RequestFailed, NoEntry."""
        request = body if prompt is None else {**body, "prompt": prompt}
        patience = replace(self._patience, patience_s=patience_s)
        answer = Answer(self._entries, request, patience, time.monotonic())
        while (todo := answer.next(time.monotonic())) is not None:
            if isinstance(todo, Post):
                async with aclosing(self._pieces(todo, answer)) as pieces:
                    async for piece in pieces:
                        yield piece
            elif isinstance(todo, Race):
                answer.awake(await self._first_awake(todo))
            else:
                await anyio.sleep(todo.seconds)

    async def _pieces(self, post: Post, answer: Answer) -> AsyncGenerator[Piece, None]:
        try:
            async with self._http.stream(**sent(post)) as response:
                if response.status_code != 200:
                    answer.refused(response.status_code, await response.aread(), time.monotonic())
                    return
                lines = response.aiter_lines()
                try:
                    async for line in lines:
                        if (piece := answer.line(line, time.monotonic())) is not None:
                            yield piece
                        if not answer.listening:
                            return
                finally:
                    await _end(lines)
                answer.lost("the stream ended without an end", time.monotonic())
        except httpx.RequestError as error:
            answer.lost(why(error), time.monotonic())

    async def _first_awake(self, race: Race) -> str | None:
        found: list[str] = []
        with anyio.move_on_after(race.within_s):
            async with anyio.create_task_group() as asking:

                async def ask(url: str) -> None:
                    if await self._is_awake(url, race.within_s):
                        found.append(url)
                        asking.cancel_scope.cancel()

                for url in race.urls:
                    asking.start_soon(ask, url)
        return found[0] if found else None

    async def _is_awake(self, url: str, within_s: float) -> bool:
        try:
            return (await self._http.get(url + "/healthz", timeout=within_s)).is_success
        except httpx.HTTPError:
            return False


async def _end(lines: AsyncIterator[str]) -> None:
    """Leave a stream before its end. httpx reads through generators within generators that it does not close, which trio warns
    of when they are collected; a read that is cancelled at once ends them all, from the innermost."""
    with anyio.CancelScope() as reading:
        reading.cancel()
        async for _ in lines:
            pass
