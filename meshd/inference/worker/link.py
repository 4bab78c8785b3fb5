"""The worker's end of the socketpair: the same frames as between peers, driven by two threads around one computing thread.

The reader thread decodes frames, answers PING at once (so a worker deep in a matrix product is *busy*, not silent) and queues
whole messages. Whoever has something to say writes what the socket takes without waiting, which is nearly always all of it; the
writer thread does the waiting for the rest. Only the computing thread calls `take`, `reply` and `fail`; those never block on the
socket, so a daemon that reads slowly cannot stop the arithmetic.

Invariants: one lock guards the multiplexer and the queue; what may be queued is bounded by the multiplexer (streams, unread
bytes). Any end of the socket, or bytes that are no frames, closes the link: `take` then raises EOFError.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshd.errors import BadFrame
from meshd.links.multiplex import Arrived, Cancelled, Event, Failed, Multiplexer, Opened, Pinged
from meshd.links.wire import Message

_RECEIVE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Call:
    """A request; answer it on ``stream``. ``arrived`` is monotonic seconds."""

    stream: int
    message: Message
    arrived: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Nobody waits for the answer on ``stream`` any more."""

    stream: int


class WorkerLink:
    """The link of one worker. ``state`` makes what a PONG carries, in the reader's thread: it must be quick and not lock.
    ``on_end`` is called there when the daemon is gone, for a worker that has no turn in which to notice."""

    def __init__(
        self,
        sock: socket.socket,
        state: Callable[[], Mapping[str, Any]],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = sock
        self._state = state
        self._on_end = on_end
        self._mux = Multiplexer(dialler=False)
        self._queue: deque[Call | Withdrawn] = deque()
        self._closed = False
        self._rest = b""  # taken from the multiplexer, not yet written
        self._writing = False  # the writer thread is in the socket
        lock = threading.Lock()
        self._arrived = threading.Condition(lock)
        self._writable = threading.Condition(lock)

    def start(self) -> None:
        """Start the threads; they end with the socket."""
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"link-{work.__name__}", daemon=True).start()

    @property
    def waiting(self) -> int:
        """How many messages `take` has not seen yet."""
        return len(self._queue)

    def take(self, timeout_s: float) -> list[Call | Withdrawn]:
        """What arrived, waiting up to ``timeout_s`` for the first. Raises EOFError once the daemon is gone."""
        with self._arrived:
            if not self._queue and not self._closed and timeout_s > 0:
                self._arrived.wait(timeout_s)
            if self._closed:
                raise EOFError
            taken = list(self._queue)
            self._queue.clear()
            return taken

    def send(self, stream: int, message: Message) -> None:
        """A message that is not the last on its stream."""
        with self._writable:
            self._mux.send(stream, message)
            self._flush()

    def reply(self, stream: int, message: Message | None = None) -> None:
        """The answer, and the end of the stream."""
        with self._writable:
            if message is not None:
                self._mux.send(stream, message)
            self._mux.end(stream)
            self._flush()

    def fail(self, stream: int, error: Exception) -> None:
        """The answer is an error."""
        with self._writable:
            self._mux.fail(stream, error)
            self._flush()

    def _close(self) -> None:
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
            self._writable.notify_all()

    def _read(self) -> None:
        try:
            while data := self._socket.recv(_RECEIVE_BYTES):
                with self._arrived:
                    for event in self._mux.receive_untrusted(data):
                        self._take_event(event)
                    self._arrived.notify()
                    self._flush()
        except (OSError, BadFrame):
            pass  # the daemon is gone or speaks no frames: either way there is nobody to answer
        finally:
            self._close()
            self._on_end()

    def _take_event(self, event: Event) -> None:
        match event:
            case Pinged(nonce):
                self._mux.pong(nonce, self._state())
            case Opened(stream, inbound) | Arrived(stream, inbound):
                self._mux.consumed(stream, inbound)
                self._queue.append(Call(stream, inbound.message, time.monotonic()))
            case Cancelled(stream) | Failed(stream):
                self._queue.append(Withdrawn(stream))
            case _:
                pass

    def _flush(self) -> None:
        """Under the lock: write what the socket takes now, leave the rest to the writer thread."""
        while not self._writing and (data := self._rest or self._mux.next_bytes()):
            try:
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reader finds the end of the socket and closes
            self._rest = data[sent:]
            if self._rest:
                self._writable.notify()
                return

    def _write(self) -> None:
        try:
            while True:
                with self._writable:
                    self._writing = False
                    self._writable.wait_for(lambda: self._closed or self._rest or self._mux.has_output)
                    if self._closed:
                        return
                    data, self._rest, self._writing = self._rest or self._mux.next_bytes(), b"", True
                self._socket.sendall(data)
        except OSError:
            pass  # as in _read
        finally:
            self._close()
