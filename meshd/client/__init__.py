"""The Python client: ask a room for an answer, streamed, going on at another entry when one dies.

Nothing of a running answer is stored anywhere but here: the seed and the ids received so far are enough for any other entry to
go on with the same tokens (`resume`), so a stream outlives the node it was asked at.

    from meshd.client import Client
    with Client(["http://n1:8090", "http://n2:8090"]) as room:
        for piece in room.stream("The capital of France is", max_tokens=16):
            print(piece.text, end="")

The same under asyncio or trio:

    from meshd.client import AsyncClient
    async with AsyncClient(["http://n1:8090", "http://n2:8090"]) as room:
        async for piece in room.stream("The capital of France is", max_tokens=16):
            print(piece.text, end="")

What is decided (which entry next, what it is sent, how long it may be silent, what may be asked again, when to give up) is
decided in `entries` and `answer`, which neither wait nor send; `sync` and `aio` do what they say with httpx.
"""

from meshd.client.aio import AsyncClient
from meshd.client.answer import Piece
from meshd.client.entries import DEFAULT_URL, NoEntry, RequestFailed
from meshd.client.sync import Client

__all__ = ["DEFAULT_URL", "AsyncClient", "Client", "NoEntry", "Piece", "RequestFailed"]
