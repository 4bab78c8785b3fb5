"""Brings chain messages to other nodes: one stream per (session, peer), both ways, opened by whoever speaks first.

Owns streams and the order of messages on them; `send` never waits: what an open stream takes at once goes at once, the rest
queues for a task of the stream's own. A big step (a prompt's chunk, a fill) goes on the pair's bulk connection, on a stream of
its own. A stream that breaks is forgotten, so that the next message dials anew, and reported once for each attempt that a message
under way or waiting was of. It must not know what messages mean, beyond where they belong.

A message that cannot reach the entry directly is given to ``via``, which passes it on. Messages to this node itself are queued,
so that a core is never entered while its effects are carried out; what a message from a peer makes this node tell itself is
delivered right after it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from meshd.chain.codec import from_wire_untrusted, to_wire
from meshd.chain.messages import ChainMessage, Fill, Step, Why
from meshd.errors import BadFrame, LinkLost, MeshdError
from meshd.links.wire import Links, Message, Stream
from meshd.vocabulary import NodeId, SessionId

BULK_ROWS: Final = 16  # more rows than this travel beside the small messages, not among them
OUTBOX: Final = 128
LOCAL: Final = 4096
_WITH_ROWS: Final = (Step, Fill)

Deliver = Callable[[NodeId, ChainMessage], None]
Report = Callable[[SessionId, NodeId, Why, int | None], None]
_Place = tuple[SessionId, NodeId, bool]


class _Outbox:
    """What waits to be sent on one stream."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream
        self.put, self.take = trio.open_memory_channel[ChainMessage](OUTBOX)
        self.waiting = 0  # messages that were put and are not yet sent
        self.attempt: int | None = None

    def offer(self, message: ChainMessage) -> bool:
        """Send ``message`` now if nothing goes before it and the stream has room."""
        if self.waiting or self.stream is None or not self.stream.offer(to_wire(message)):
            return False
        self.attempt = message.attempt
        return True


class Courier:
    """``deliver`` gets every message for this node; ``lost`` hears of peers that cannot be reached."""

    def __init__(self, self_id: NodeId, links: Links, *, deliver: Deliver, lost: Report) -> None:
        self._self = self_id
        self._links = links
        self._deliver = deliver
        self._lost = lost
        self._outboxes: dict[_Place, _Outbox] = {}
        self._inbound: dict[SessionId, set[trio.CancelScope]] = {}
        self._local: deque[ChainMessage] = deque()  # for this node itself
        self._local_waits = trio.lowlevel.ParkingLot()  # `run`, while there is nothing for this node itself
        self._delivering = False
        self._nursery: trio.Nursery | None = None

    @property
    def streams(self) -> int:
        """Open streams, both directions."""
        return len(self._outboxes) + sum(map(len, self._inbound.values()))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await self._keep_delivering()
            finally:
                self._nursery = None  # the node stops: nothing is sent any more

    async def _keep_delivering(self) -> None:
        while True:
            self.at_once(_nothing)
            if self._local:
                await trio.lowlevel.checkpoint()
            else:
                await self._local_waits.park()

    def send(self, to: NodeId, message: ChainMessage, via: NodeId | None = None) -> None:
        """Queue ``message``; what becomes of it is reported, never raised."""
        if to == self._self:
            self._send_local(message)
            return
        if via is not None and via != to and self._links.live(to) is None:
            to = via
        bulk = isinstance(message, _WITH_ROWS) and message.n > BULK_ROWS
        place = (message.session, to, bulk)
        outbox = self._outboxes.get(place)
        if outbox is None:
            outbox = self._outboxes[place] = _Outbox()
            self._start(place, outbox)
        if outbox.offer(message):
            return
        try:
            outbox.put.send_nowait(message)
            outbox.waiting += 1
        except trio.WouldBlock:
            self._lost(message.session, to, Why.SILENT, message.attempt)

    def close(self, session: SessionId) -> None:
        """The session is over here: what is queued still goes out, then its streams end."""
        for place in [place for place in self._outboxes if place[0] == session]:
            self._outboxes.pop(place).put.close()
        for scope in self._inbound.pop(session, ()):
            scope.cancel()

    async def handle(self, source: NodeId, first: Message, stream: Stream) -> None:
        """Read a stream that a peer opened, until it ends."""
        message = self._decode(first, stream)
        if message is None:
            return
        session = message.session
        place = (session, source, False)
        outbox = None
        if place not in self._outboxes:
            outbox = self._outboxes[place] = _Outbox(stream)
            self._start(place, outbox)
        with trio.CancelScope() as scope:
            self._inbound.setdefault(session, set()).add(scope)
            try:
                self._deliver_from(source, message)
                await self._read(place, stream)
            finally:
                self._forget_scope(session, scope)
                if outbox is None:
                    stream.cancel()  # nothing is ever sent on it from here
                else:
                    self._drop(place, outbox)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self, place: _Place, outbox: _Outbox) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._write, place, outbox)

    def _send_local(self, message: ChainMessage) -> None:
        if len(self._local) >= LOCAL:
            self._lost(message.session, self._self, Why.FULL, message.attempt)
            return
        self._local.append(message)
        if not self._delivering:
            self._local_waits.unpark()

    def _deliver_from(self, source: NodeId, message: ChainMessage) -> None:
        """A peer's message, and what it made this node tell itself."""
        self.at_once(lambda: self._deliver(source, message))

    def at_once(self, act: Callable[[], None]) -> None:
        """Do what may make this node tell itself something, and deliver that without a task's turn between."""
        if self._delivering:
            act()  # whoever delivers goes on with what this adds
            return
        self._delivering = True
        try:
            act()
            self._deliver_local()
        finally:
            self._delivering = False
            if self._local:
                self._local_waits.unpark()

    def _deliver_local(self) -> None:
        """What waits now; what that leads to has its turn later, so that others have theirs between."""
        for _ in range(len(self._local)):
            self._deliver(self._self, self._local.popleft())

    def _forget_scope(self, session: SessionId, scope: trio.CancelScope) -> None:
        scopes = self._inbound.get(session)
        if scopes is not None:
            scopes.discard(scope)
            if not scopes:
                del self._inbound[session]

    async def _write(self, place: _Place, outbox: _Outbox) -> None:
        """Own one stream's sending side; open the stream if a peer did not."""
        why = Why.REFUSED
        try:
            async with trio.open_nursery() as readers:
                async for message in outbox.take:
                    outbox.attempt = message.attempt
                    if outbox.stream is None:
                        link = await self._links.get(place[1])
                        outbox.stream = await link.open(to_wire(message), bulk=place[2])
                        readers.start_soon(self._read, place, outbox.stream)
                    else:
                        await outbox.stream.send(to_wire(message))
                    outbox.waiting -= 1
                    why = Why.RESET
                if outbox.stream is not None:
                    await outbox.stream.end()
                readers.cancel_scope.cancel()
        except* MeshdError:
            self._break(place, outbox, why)

    async def _read(self, place: _Place, stream: Stream) -> None:
        """Deliver what comes on ``stream`` until the peer ends it or gives it up; nothing more is sent on it then."""

        def take(raw: Message) -> None:
            message = self._decode(raw, stream)
            if message is not None:
                self._deliver_from(place[1], message)

        try:
            await stream.listen(take)  # whoever ends a stream is done with its session
        except LinkLost:
            self._drop(place, self._outboxes.get(place))
            self._lost(place[0], place[1], Why.RESET, None)
            return
        except MeshdError:
            pass  # the peer gave the stream up; its link lives, and what it had to say it says in messages
        outbox = self._outboxes.get(place)
        if outbox is not None and outbox.stream is stream:
            self._drop(place, outbox)

    def _decode(self, raw: Message, stream: Stream) -> ChainMessage | None:
        try:
            return from_wire_untrusted(raw)
        except BadFrame as error:
            stream.fail(error)
            return None

    def _drop(self, place: _Place, outbox: _Outbox | None) -> None:
        """The stream of ``outbox`` is over: what is queued still goes out, the next message opens another."""
        if outbox is not None and self._outboxes.get(place) is outbox:
            del self._outboxes[place]
            outbox.put.close()

    def _break(self, place: _Place, outbox: _Outbox, why: Why) -> None:
        if self._outboxes.get(place) is outbox:
            del self._outboxes[place]
        attempts = {outbox.attempt: None}
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                attempts[outbox.take.receive_nowait().attempt] = None
        outbox.take.close()
        for attempt in attempts:
            self._lost(place[0], place[1], why, attempt)


def _nothing() -> None:
    """Only what waits already is delivered."""
