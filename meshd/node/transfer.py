"""One transfer of tensors from several neighbours: who brings what, and what happens when one dies or lies.

Owns the table of tensors still to come. Each neighbour is given a batch at a time; what it did not bring goes back into
the table, with the bytes that came counted, and another neighbour goes on from there. So it does when one is slow, not gone: who
has nothing left to bring takes over from whoever is at less than half of its own pace. A tensor that came wholly from one
neighbour and is damaged makes that neighbour a liar; one pieced together from several accuses nobody and is fetched again
from its start. Bytes are written in threads, one write at a time. Bounded: one batch per neighbour, pieces of 256 KiB.

Errors: StoreFull and StateError end the transfer; LinkLost when nobody is left who could bring the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from meshd.errors import BadFrame, LinkLost, MeshdError, ModelRefused, StateError, StoreFull
from meshd.links.wire import Links, Stream
from meshd.models.shard import IncomingShard, Wanted
from meshd.node.share_wire import PART_TENSORS_CAP, ask_parts, piece_untrusted
from meshd.vocabulary import MB, NodeId

BATCH_BYTES: Final = 16 * MB
STALLED_S: Final = 10.0
TRIES: Final = 3  # failures of one neighbour before the transfer goes on without it
IDLE_S: Final = 5.0  # with nothing to bring, before a slower neighbour is relieved
_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Source:
    """A neighbour and the tensors it has."""

    node: NodeId
    names: frozenset[str]


@dataclass(slots=True)
class _Item:
    """A tensor that is not here yet. ``origins``: who brought its bytes so far ("" for an earlier transfer)."""

    name: str
    size_bytes: int
    have_bytes: int
    origins: set[str]
    taken: bool = False  # a neighbour is bringing it

    @property
    def here(self) -> bool:
        return self.have_bytes == self.size_bytes


@dataclass(slots=True)
class _Batch:
    """What a neighbour is bringing, since when, and how much of it came. Cancelling ``scope`` relieves it."""

    items: list[_Item]
    began: float
    came_bytes: int = 0
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def pace(self, now: float) -> float:
        """Bytes a second."""
        return self.came_bytes / max(now - self.began, 1e-3)


class Transfer:
    """Run it once. ``base`` is the digest whose files are fetched; ``on_liar`` hears who sent wrong bytes."""

    def __init__(
        self,
        shard: IncomingShard,
        wanted: Sequence[Wanted],
        base: str,
        links: Links,
        *,
        progress: Callable[[float], None],
        on_liar: Callable[[NodeId, str], None],
    ) -> None:
        self._shard = shard
        self._base = base
        self._links = links
        self._progress = progress
        self._on_liar = on_liar
        self._items = [_Item(w.name, w.size_bytes, w.have_bytes, {""} if w.have_bytes else set()) for w in wanted]
        self._total = sum(item.size_bytes for item in self._items) or 1
        self._running: dict[NodeId, _Batch] = {}
        self._paces: dict[NodeId, float] = {}  # of each neighbour's last batch
        self._writing = trio.Lock()
        self._changed = trio.Event()
        self._why = "no neighbour has what is missing"
        self.received_bytes = 0

    async def run(self, sources: Sequence[Source]) -> None:
        """Until everything is here. Raises StoreFull, StateError, LinkLost."""
        fatal: list[MeshdError] = []

        async def work(source: Source) -> None:
            try:
                await self._from(source)
            except (StoreFull, StateError) as error:
                fatal.append(error)
                nursery.cancel_scope.cancel()
            finally:
                self._wake()

        async with trio.open_nursery() as nursery:
            for source in sources:
                nursery.start_soon(work, source)
        if fatal:
            raise fatal[0]
        missing = [item for item in self._items if not item.here]
        if missing:
            raise LinkLost(f"{len(missing)} tensors of {self._shard.manifest.spec.name} did not come: {self._why}")

    async def _from(self, source: Source) -> None:
        """Fetch from one neighbour for as long as it may have something that is wanted."""
        failures = 0
        while not all(item.here for item in self._items if item.name in source.names):
            changed = self._changed
            batch = self._take(source)
            if not batch:  # others bring the rest, and may fail to
                with trio.move_on_after(IDLE_S) as idle:
                    await changed.wait()
                if idle.cancelled_caught:
                    self._relieve(source)
                continue
            running = self._running[source.node] = _Batch(batch, trio.current_time())
            try:
                with running.scope:
                    await self._bring(source, batch)
                failures = 0
            except ModelRefused as error:
                self._why = error.message
                self._on_liar(source.node, error.message)
                return
            except (StoreFull, StateError):
                raise
            except MeshdError as error:  # the link broke, or it has no such tensor, or is too busy
                self._why = error.message
                failures += 1
            finally:
                del self._running[source.node]
                self._paces[source.node] = running.pace(trio.current_time())
                self._put_back(batch)
            if failures >= TRIES:
                return
            # Who was relieved lets the other one take what it has put back.
            await trio.sleep(_PAUSE_S * (failures + running.scope.cancelled_caught))

    def _relieve(self, source: Source) -> None:
        """Have the slowest neighbour that is at less than half of this one's pace put back what this one has, too."""
        now, own = trio.current_time(), self._paces.get(source.node, math.inf)
        slower = [
            batch
            for batch in self._running.values()
            if now - batch.began >= IDLE_S and 2 * batch.pace(now) < own
            if any(item.name in source.names and not item.here for item in batch.items)
        ]
        if slower:
            min(slower, key=lambda batch: batch.pace(now)).scope.cancel()

    def _take(self, source: Source) -> list[_Item]:
        batch: list[_Item] = []
        size = 0
        for item in self._items:
            if item.here or item.taken or item.name not in source.names:
                continue
            batch.append(item)
            item.taken = True
            size += item.size_bytes - item.have_bytes
            if size >= BATCH_BYTES or len(batch) == PART_TENSORS_CAP:
                break
        return batch

    def _put_back(self, batch: list[_Item]) -> None:
        for item in batch:
            item.taken = False
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- one batch ----------------------------------------------------------------------------------------------------

    async def _bring(self, source: Source, batch: list[_Item]) -> None:
        link = await self._links.get(source.node)
        parts = [(item.name, item.have_bytes) for item in batch]
        stream: Stream = await link.open(ask_parts(self._base, parts), bulk=True)
        try:
            await stream.end()
            while not all(item.here for item in batch):
                with stalled():
                    message = await stream.receive()
                if message is None:
                    raise LinkLost("the neighbour ended before everything had come")
                index, at, data = piece_untrusted(message)
                if index >= len(batch):
                    raise BadFrame("a piece of nothing that was asked for")
                await self._write(source, batch[index], at, data)
        finally:
            stream.cancel()

    async def _write(self, source: Source, item: _Item, at: int, data: bytes) -> None:
        """Keep a piece. Raises ModelRefused if that proves ``source`` wrong."""
        if at != item.have_bytes:
            raise BadFrame(f"bytes of {item.name!r} came from {at}, {item.have_bytes} was next")
        item.origins.add(source.node)
        async with self._writing:
            try:
                await trio.to_thread.run_sync(self._shard.write, item.name, at, data)
            except ModelRefused:
                origins, item.origins, item.have_bytes = item.origins, set(), 0
                if origins == {source.node}:
                    raise
                raise LinkLost(
                    f"tensor {item.name!r} came damaged from several neighbours; it is fetched again"
                ) from None
        item.have_bytes += len(data)
        self._running[source.node].came_bytes += len(data)
        self.received_bytes += len(data)
        self._progress(sum(each.have_bytes for each in self._items) / self._total)


@contextmanager
def stalled() -> Iterator[None]:
    """A neighbour that sends nothing for `STALLED_S` counts as gone. Raises LinkLost."""
    try:
        with trio.fail_after(STALLED_S):
            yield
    except trio.TooSlowError:
        raise LinkLost(f"the neighbour sent nothing for {STALLED_S:g} s") from None
