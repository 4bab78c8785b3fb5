"""The network between simulated nodes: datagrams and connections in memory, with everything that goes wrong in a room.

Owns what travels: latency, loss, doubling, disorder, ways that are cut in one direction, machines that are off, processes that
are gone. Datagrams get lost; connections keep order and wait, as TCP's do (a lost segment comes late, what is sent into a cut
comes after it is mended), and are reset when the other process is known to be gone. One task carries everything (`run`), so no
node ever runs inside another one's step. Hosts are names of nodes; a node's address is `address_of`.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import trio

from meshd.links.transport import Buffer, Transport
from meshd.vocabulary import Endpoint
from tests.sim.whole.world import NODE

MESH_PORT: Final = 8091
UDP_BUFFER_BYTES: Final = 1 << 20
TCP_BUFFER_BYTES: Final = 512 << 10  # both kernels' together
BACKLOG: Final = 128
GRID_S: Final = 0.0005  # arrivals on a grid: what comes together wakes the world once


@dataclass(slots=True)
class Weather:
    """How every way is, but for the cut ones."""

    latency_s: float = 0.001
    jitter_s: float = 0.002
    loss: float = 0.0
    double: float = 0.0


class Net:
    """See the module. ``address_of`` and ``host_at`` translate between names and addresses."""

    def __init__(self, rng: Random) -> None:
        self.weather = Weather()
        self._rng = rng
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()
        self._sleep = trio.CancelScope()
        self._addresses: dict[str, str] = {}
        self._udp: dict[str, Udp] = {}
        self._listeners: dict[str, Listener] = {}
        self._ends: dict[str, list[End]] = {}
        self._cut: set[tuple[str, str]] = set()
        self._off: set[str] = set()
        self._by_fd: dict[int, Udp] = {}

    # --- the carrier --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry until cancelled."""
        while True:
            while self._due and self._due[0][0] <= trio.current_time():
                _, _, what, args = heapq.heappop(self._due)
                what(*args)
            with trio.CancelScope(deadline=self._due[0][0] if self._due else math.inf) as self._sleep:
                await trio.sleep_forever()

    def _at(self, due: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._due, (due, next(self._count), what, args))
        self._sleep.deadline = min(self._sleep.deadline, due)

    def _arrival(self) -> float:
        at = trio.current_time() + self.weather.latency_s + self._rng.random() * self.weather.jitter_s
        return math.ceil(at / GRID_S) * GRID_S

    # --- who is where -------------------------------------------------------------------------------------------------

    def address(self, host: str) -> Endpoint:
        literal = next((a for a, name in self._addresses.items() if name == host), None)
        if literal is None:
            literal = f"10.0.0.{len(self._addresses) + 1}"
            self._addresses[literal] = host
        return Endpoint(literal, MESH_PORT)

    def begin(self, host: str) -> tuple[Udp, Listener]:
        """The sockets of a process that starts there."""
        if host in self._off:
            self._off.discard(host)
            self._try_again(lambda end: end.to == host)
        udp = self._udp[host] = Udp(self, host)
        self._by_fd[udp.fileno()] = udp
        listener = self._listeners[host] = Listener(self.address(host))
        return udp, listener

    def end(self, host: str) -> None:
        """The process is gone; its kernel tells whom it can reach."""
        if host in self._udp:
            del self._udp[host]  # not its number: the process may still wait for it
        self._listeners.pop(host, None)
        for end in self._ends.pop(host, []):
            end.gone = True
            self._refuse(end)

    def off(self, host: str) -> None:
        """The machine loses its power: nobody is told anything."""
        self._off.add(host)
        self.end(host)

    def cut(self, source: str, to: str) -> None:
        """Nothing passes in that direction."""
        self._cut.add((source, to))

    def mend(self) -> None:
        """Every way is open again; what waited on connections comes after TCP's next try."""
        self._cut.clear()
        self._try_again(lambda _end: True)

    def _try_again(self, which: Callable[[End], bool]) -> None:
        for ends in list(self._ends.values()):
            for end in ends:
                if end.held and which(end):
                    self._at(trio.current_time() + self._rng.uniform(0.05, 2.0), self._retransmit, end)

    def touched(self, host: str) -> bool:
        """Whether a way from or to it is cut."""
        return any(host in pair for pair in self._cut)

    def passes(self, source: str, to: str) -> bool:
        return (source, to) not in self._cut and not self._off & {source, to}

    # --- datagrams ----------------------------------------------------------------------------------------------------

    def datagram(self, sender: Udp, address: tuple[str, int], data: bytes) -> None:
        to = self._addresses.get(address[0])
        if to is None or self._udp.get(sender.host) is not sender or not self.passes(sender.host, to):
            return
        for _ in range(1 + (self._rng.random() < self.weather.double)):
            if self._rng.random() >= self.weather.loss:
                late = self._rng.uniform(0.0, 0.1) if self._rng.random() < self.weather.double else 0.0
                self._at(self._arrival() + late, self._datagram, to, self.address(sender.host), data)

    def _datagram(self, to: str, source: Endpoint, data: bytes) -> None:
        udp = self._udp.get(to)
        if udp is not None:
            udp.arrive(data, source)

    async def readable(self, fd: int) -> None:
        """`trio.lowlevel.wait_readable` for our sockets."""
        await self._by_fd[fd].readable()

    # --- connections --------------------------------------------------------------------------------------------------

    async def connect(self, host: str, port: int, **_options: Any) -> Any:
        """`trio.open_tcp_stream` as the node that calls it. Raises OSError."""
        source, to, wait_s = NODE.get(), self._addresses.get(host), 1.0
        while True:
            await trio.sleep(self._arrival() - trio.current_time())
            if to is None or to in self._off:
                await trio.sleep(3.0)
                raise OSError(errno.EHOSTUNREACH, "No route to host")
            if self.passes(source, to) and self.passes(to, source) and self._rng.random() >= self.weather.loss:
                break
            await trio.sleep(wait_s)
            wait_s *= 2
        await trio.sleep(self._arrival() - trio.current_time())
        listener = self._listeners.get(to)
        if listener is None or len(listener.backlog) >= BACKLOG:
            raise OSError(errno.ECONNREFUSED, "Connection refused")
        mine = End(self, source, to, self.address(to))
        theirs = End(self, to, source, Endpoint(self.address(source).host, 40000))
        mine.other, theirs.other = theirs, mine
        for end in (mine, theirs):
            self._ends.setdefault(end.host, []).append(end)
        listener.arrive(theirs)
        return mine

    def segment(self, end: End, data: bytes | None) -> None:
        """``data`` sets out to the other side; None is the end of the stream."""
        if end.gone:
            return
        if end.held or not self.passes(end.host, end.to):
            end.held.append(data)
            return
        late_s = 0.0
        while self._rng.random() < self.weather.loss and late_s < 3.0:
            late_s = 2 * late_s or 0.2
        end.last_arrival = max(end.last_arrival, self._arrival() + late_s)
        self._at(end.last_arrival, self._arrive, end, data)

    def _retransmit(self, end: End) -> None:
        if self.passes(end.host, end.to):
            held, end.held = end.held, []
            for data in held:
                self.segment(end, data)

    def _arrive(self, end: End, data: bytes | None) -> None:
        """A segment of ``end`` reaches the other machine."""
        other = end.other
        if not self.passes(end.host, end.to):
            end.held.append(data)  # the cut came while it was under way
        elif other.gone or (other.closed and data is not None):
            self._refuse(other)
        else:
            other.arrive(data)

    def _refuse(self, end: End) -> None:
        """The machine of ``end`` knows no such connection, and says so."""
        if self.passes(end.host, end.to):
            self._at(self._arrival(), end.other.be_reset)

    def forget(self, end: End) -> None:
        """Both sides are done with it."""
        ends = self._ends.get(end.host, [])
        if end in ends:
            ends.remove(end)


_fds = itertools.count(1 << 20)


class Udp:
    """A non-blocking datagram socket of one process: `meshd.gossip.transport.UdpSocket`."""

    family: Final = socket.AF_INET

    def __init__(self, net: Net, host: str) -> None:
        self.host = host
        self._net = net
        self._fd = next(_fds)
        self._inbox: deque[tuple[bytes, tuple[str, int]]] = deque()
        self._bytes = 0
        self._waiting = trio.lowlevel.ParkingLot()

    def fileno(self) -> int:
        return self._fd

    def sendto(self, data: bytes, address: tuple[str, int], /) -> int:
        self._net.datagram(self, address, data)
        return len(data)

    def recvfrom(self, _size: int, /) -> tuple[bytes, tuple[str, int]]:
        if not self._inbox:
            raise BlockingIOError
        data, source = self._inbox.popleft()
        self._bytes -= len(data)
        return data, source

    def arrive(self, data: bytes, source: Endpoint) -> None:
        if self._bytes + len(data) <= UDP_BUFFER_BYTES:
            self._inbox.append((data, (source.host, source.port)))
            self._bytes += len(data)
            self._waiting.unpark_all()

    async def readable(self) -> None:
        if not self._inbox:
            await self._waiting.park()
        else:
            await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Its process ends; `Net.end` takes it away."""


class _Name:
    """What is asked of a stream's or listener's socket."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._name = (endpoint.host, endpoint.port)

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def getpeername(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        """Nothing to give back."""


class Listener(trio.abc.Listener[Any]):
    """Accepts connections, once somebody asks; until then they wait, established."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.socket = _Name(endpoint)
        self.backlog: deque[End] = deque()
        self._waiting = trio.lowlevel.ParkingLot()

    def arrive(self, end: End) -> None:
        self.backlog.append(end)
        self._waiting.unpark()

    async def accept(self) -> Any:
        await trio.lowlevel.checkpoint()
        while not self.backlog:
            await self._waiting.park()
        return self.backlog.popleft()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class End(Transport):
    """One side of a connection."""

    other: End

    def __init__(self, net: Net, host: str, to: str, peer: Endpoint) -> None:
        self.socket = _Name(peer)
        self.host, self.to = host, to
        self.gone = False  # its process
        self.closed = False  # by its process
        self.held: list[bytes | None] = []  # sent into a cut
        self.last_arrival = 0.0
        self._net = net
        self._inbox = bytearray()
        self._ended = False
        self._reset = False
        self._unread_bytes = 0  # written here, not read there
        self._reading, self._writing = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    def write(self, data: Buffer) -> None:
        self._check()
        if data:
            self._unread_bytes += len(data)
            self._net.segment(self, bytes(data))

    @property
    def pending(self) -> bool:
        return self._unread_bytes > TCP_BUFFER_BYTES and not (self._reset or self.closed)

    async def drain(self) -> None:
        while self.pending:
            await self._writing.park()
        self._check()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._inbox:
            self._check()
            if self._ended:
                return b""
            await self._reading.park()
        data = bytes(self._inbox[:max_bytes])
        del self._inbox[: len(data)]
        self.other.was_read(len(data))
        return data

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self._net.segment(self, None)
            self._wake()
        await trio.lowlevel.checkpoint()

    def _check(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError("closed here")
        if self._reset:
            raise trio.BrokenResourceError("connection reset by peer")

    def _wake(self) -> None:
        self._reading.unpark_all()
        self._writing.unpark_all()

    # --- what the net tells it ----------------------------------------------------------------------------------------

    def arrive(self, data: bytes | None) -> None:
        if data is None:
            self._ended = True
            if self.closed:
                self._net.forget(self)
                self._net.forget(self.other)
        else:
            self._inbox += data
        self._reading.unpark_all()

    def was_read(self, size_bytes: int) -> None:
        self._unread_bytes -= size_bytes
        if not self.pending:
            self._writing.unpark_all()

    def be_reset(self) -> None:
        if not self.gone:
            self._reset = True
            self._inbox.clear()
            self._net.forget(self)
            self._wake()
