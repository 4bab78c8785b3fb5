"""The three ways to the same client, with one face: so that each test is asked of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, Protocol, TypeVar

import trio

from meshd.client import AsyncClient, Client, Piece
from meshd.client.talk import Message

T = TypeVar("T")


class Door(Protocol):
    """One client for each call, closed after it. ``first``: how many pieces are taken before the stream is left."""

    def get(self, urls: Sequence[str], path: str) -> Any: ...

    def text(self, urls: Sequence[str], path: str) -> str: ...

    def ask(self, urls: Sequence[str], prompt: str, **body: Any) -> Mapping[str, Any]: ...

    def stream(self, urls: Sequence[str], *, first: int = 0, silence_s: float = 1.5, **body: Any) -> list[Piece]: ...

    def chat(self, urls: Sequence[str], messages: list[Message], said: str, *, first: int = 0, **body: Any) -> None: ...


class Sync:
    def get(self, urls: Sequence[str], path: str) -> Any:
        with Client(urls) as room:
            return room.get(path)

    def text(self, urls: Sequence[str], path: str) -> str:
        with Client(urls) as room:
            return room.text(path)

    def ask(self, urls: Sequence[str], prompt: str, **body: Any) -> Mapping[str, Any]:
        with Client(urls) as room:
            return room.ask(prompt, **body)

    def stream(self, urls: Sequence[str], *, first: int = 0, silence_s: float = 1.5, **body: Any) -> list[Piece]:
        with Client(urls, silence_s=silence_s) as room, closing(room.stream("x", **body)) as pieces:
            return [piece for _, piece in zip(range(first or 1000), pieces, strict=False)]

    def chat(self, urls: Sequence[str], messages: list[Message], said: str, *, first: int = 0, **body: Any) -> None:
        with Client(urls) as room, closing(room.chat(messages, said, **body)) as pieces:
            for _ in zip(range(first or 1000), pieces, strict=False):
                pass


class Async:
    """In an event loop of its own."""

    def __init__(self, run: Callable[[Callable[[], Awaitable[Any]]], Any]) -> None:
        self._run = run

    def _with(self, urls: Sequence[str], use: Callable[[AsyncClient], Awaitable[T]], silence_s: float = 1.5) -> T:
        async def whole() -> T:
            async with AsyncClient(urls, silence_s=silence_s) as room:
                return await use(room)

        found: T = self._run(whole)
        return found

    def get(self, urls: Sequence[str], path: str) -> Any:
        return self._with(urls, lambda room: room.get(path))

    def text(self, urls: Sequence[str], path: str) -> str:
        return self._with(urls, lambda room: room.text(path))

    def ask(self, urls: Sequence[str], prompt: str, **body: Any) -> Mapping[str, Any]:
        return self._with(urls, lambda room: room.ask(prompt, **body))

    def stream(self, urls: Sequence[str], *, first: int = 0, silence_s: float = 1.5, **body: Any) -> list[Piece]:
        async def use(room: AsyncClient) -> list[Piece]:
            found: list[Piece] = []
            async with aclosing(room.stream("x", **body)) as pieces:
                async for piece in pieces:
                    found.append(piece)
                    if len(found) == first:
                        break
            return found

        return self._with(urls, use, silence_s)

    def chat(self, urls: Sequence[str], messages: list[Message], said: str, *, first: int = 0, **body: Any) -> None:
        async def use(room: AsyncClient) -> None:
            taken = 0
            async with aclosing(room.chat(messages, said, **body)) as pieces:
                async for _ in pieces:
                    taken += 1
                    if taken == first:
                        break

        self._with(urls, use)


def in_asyncio(whole: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await whole()

    return asyncio.run(main())


DOORS: dict[str, Door] = {"sync": Sync(), "asyncio": Async(in_asyncio), "trio": Async(trio.run)}
