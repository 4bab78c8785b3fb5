"""Hands parts of this device's models to neighbours that ask.

Owns how much of the device that may take: few streams at a time, one piece of each in memory, files read in threads. Gives out
only what the store's manifest names; a name from the network is looked up and never used as a path. A model that is removed
meanwhile ends its streams with an error. Errors reach the neighbour through its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from meshd.errors import Busy, ModelNotFound
from meshd.links.fields import digest_untrusted
from meshd.links.wire import Message, Stream
from meshd.models.headers import JSON_CAP_BYTES, TensorInfo, read_capped
from meshd.models.manifest import MANIFEST_FILE
from meshd.models.shard import COMPANION_CAP_BYTES, COMPANIONS, read_part
from meshd.models.store import ModelStore, StoredModel
from meshd.node.model import Served
from meshd.node.share_wire import (
    FILE,
    MANIFEST,
    PIECE_BYTES,
    Offer,
    file_untrusted,
    offer_message,
    parts_untrusted,
    piece_message,
)
from meshd.vocabulary import LayerRange, NodeId

STREAMS: Final = 4
MAX_WAITING: Final = 32
STALLED_S: Final = 30.0  # a neighbour that reads nothing for so long is given up
_KNOWN: Final = 4


@dataclass(frozen=True, slots=True)
class _Shelf:
    """A stored model, opened."""

    model: StoredModel
    held: tuple[LayerRange, ...]
    tensors: Mapping[str, TensorInfo]


class ModelShare:
    """Answers streams whose kind begins with ``models.``. ``served`` tells of the rehearsal model."""

    def __init__(self, store: ModelStore, served: Callable[[], Served | None]) -> None:
        self._store = store
        self._served = served
        self._places = trio.CapacityLimiter(STREAMS)
        self._shelves: dict[str, _Shelf] = {}
        self.sent_bytes = 0

    async def serve(self, peer: NodeId, message: Message, stream: Stream) -> None:
        """One question. Raises what the caller should end the stream with."""
        del peer  # whoever has a link is a member, and every member may have what this node has
        digest = digest_untrusted(message.head)
        if self._places.statistics().tasks_waiting >= MAX_WAITING:
            raise Busy("too many neighbours fetch from this node")
        async with self._places:
            if message.kind == MANIFEST:
                await _send(stream, offer_message(await self._offer(digest)))
            elif message.kind == FILE:
                await self._give_file(await self._shelf(digest), file_untrusted(message), stream)
            else:
                await self._give_parts(await self._shelf(digest), parts_untrusted(message), stream)
            await stream.end()

    async def _offer(self, digest: str) -> Offer:
        served = self._served()
        if served is not None and served.rehearsal is not None and served.spec.digest == digest:
            model = served.rehearsal
            return Offer(model.name, "", (), {}, b"", rehearsal=f"{model.name},seed={model.seed}")
        self._shelves.pop(digest, None)  # a transfer begins: what is on the disk now counts
        shelf = await self._shelf(digest)
        return await trio.to_thread.run_sync(_offer_of, shelf)

    async def _shelf(self, digest: str) -> _Shelf:
        shelf = self._shelves.get(digest)
        if shelf is None:
            shelf = await trio.to_thread.run_sync(self._open, digest)
            while len(self._shelves) >= _KNOWN:
                del self._shelves[next(iter(self._shelves))]
            self._shelves[digest] = shelf
        return shelf

    def _open(self, digest: str) -> _Shelf:
        model = self._store.by_digest(digest)
        if model is None:
            raise ModelNotFound(f"this node has no model {digest}")
        folder = model.open()
        return _Shelf(model, folder.held(), folder.checkpoint.tensors)

    async def _give_file(self, shelf: _Shelf, name: str, stream: Stream) -> None:
        path = shelf.model.path / name
        if not path.is_file():
            raise ModelNotFound(f"{shelf.model.name} has no {name} here")
        with path.open("rb") as file:
            at = 0
            while data := await trio.to_thread.run_sync(file.read, PIECE_BYTES):
                await self._give(stream, 0, at, data)
                at += len(data)

    async def _give_parts(self, shelf: _Shelf, parts: list[tuple[str, int]], stream: Stream) -> None:
        for index, (name, offset) in enumerate(parts):
            tensor = shelf.tensors.get(name)
            if tensor is None:
                raise ModelNotFound(f"{shelf.model.name} has no tensor {name[:200]!r} here")
            at = offset
            while at < tensor.size_bytes:
                data = await trio.to_thread.run_sync(_read, shelf.model, tensor, at)
                await self._give(stream, index, at, data)
                at += len(data)

    async def _give(self, stream: Stream, index: int, at: int, data: bytes) -> None:
        await _send(stream, piece_message(index, at, data))
        self.sent_bytes += len(data)


async def _send(stream: Stream, message: Message) -> None:
    with trio.move_on_after(STALLED_S):
        await stream.send(message)
        return
    raise Busy("a neighbour stopped reading")


def _read(model: StoredModel, tensor: TensorInfo, at: int) -> bytes:
    try:
        data = read_part(model.path, tensor, at, PIECE_BYTES)
    except OSError as error:
        raise ModelNotFound(f"{model.name} is no longer here") from error
    if not data:
        raise ModelNotFound(f"{tensor.file} of {model.name} is cut off here")
    return data


def _offer_of(shelf: _Shelf) -> Offer:
    path = shelf.model.path
    sizes = {name: (path / name).stat().st_size for name in COMPANIONS if (path / name).is_file()}
    name, _, dtype = shelf.model.name.partition("@")
    return Offer(
        name=name,
        dtype=dtype,
        held=shelf.held,
        files={name: size for name, size in sizes.items() if size <= COMPANION_CAP_BYTES},
        manifest=read_capped(path / MANIFEST_FILE, JSON_CAP_BYTES),
    )
