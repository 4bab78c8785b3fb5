"""Gossip's UDP sockets: bind, send, drain. No meaning, no timers, no keys.

Sockets are plain non-blocking ones: sending never waits, so nothing can be cancelled half-way, and a full buffer is a lost
datagram. A failed send says nothing about the next one: no error here removes an address, closes a socket or ends the daemon
(EHOSTUNREACH, ENETUNREACH, ENETDOWN, ENOBUFS and EPERM come and go with the radio, with sleep and with firewalls). Errors are
counted by name and the first of a run of equal ones is logged.

Raises LocalError when an address cannot be bound, naming address, port and flag.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

import trio

from meshd.errors import LocalError
from meshd.gossip.addresses import is_literal
from meshd.vocabulary import Endpoint

RECEIVE_BUFFER_BYTES: Final = 1 << 20
_DRAIN_AT_ONCE: Final = 1024  # datagrams, then somebody else gets a turn
_LONGEST: Final = 2048  # anything longer than a datagram may be is refused by its length
_ERRORS_IN_A_ROW: Final = 16

_log = logging.getLogger(__name__)


class UdpSocket(Protocol):
    """What is used of a non-blocking UDP socket; tests hand in their own."""

    @property
    def family(self) -> int: ...

    def fileno(self) -> int: ...

    def sendto(self, data: bytes, address: tuple[str, int], /) -> int: ...

    def recvfrom(self, size: int, /) -> tuple[bytes, tuple[str, int]]: ...

    def close(self) -> None: ...


def bind(endpoint: Endpoint) -> list[UdpSocket]:
    """Bind every address the host stands for (one, normally). Raises LocalError.

    Neither SO_REUSEADDR nor SO_REUSEPORT: two daemons on one port would each get half of the datagrams.
    """
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, socket.SOCK_DGRAM)
            bound.append(sock)
            sock.setblocking(False)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            sock.bind(address)
    except OSError as error:
        for sock in bound:
            sock.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is in use by another program" if taken else f"cannot be used ({error.strerror or error})"
        raise LocalError(f"{endpoint} (UDP) {reason}; choose another with --mesh HOST:PORT", param="--mesh") from error
    return [*bound]


class Transport:
    """Sends to addresses and yields what arrived."""

    def __init__(self, sockets: Sequence[UdpSocket]) -> None:
        self._sockets = sockets
        self.errors: Counter[str] = Counter()
        self._last_error = ""
        self.sent_datagrams = 0
        self.sent_bytes = 0
        self.received_datagrams = 0
        self.received_bytes = 0

    def send(self, to: Endpoint, data: bytes) -> bool:
        """Try once. False when the system refused (the next one may pass), or for a name: looking it up would block."""
        family = socket.AF_INET6 if ":" in to.host else socket.AF_INET
        sock = next((s for s in self._sockets if s.family == family), None)
        if sock is None or not is_literal(to.host):
            return False
        try:
            sock.sendto(data, (to.host, to.port))
        except BlockingIOError:
            self._failed("EAGAIN", to)
            return False
        except OSError as error:
            self._failed(errno.errorcode.get(error.errno or 0, "OSError"), to)
            return False
        except (TypeError, ValueError) as error:  # what a peer says of its addresses must not end the daemon
            self._failed(type(error).__name__, to)
            return False
        self._last_error = ""
        self.sent_datagrams += 1
        self.sent_bytes += len(data)
        return True

    def drain(self, sockets: Iterable[UdpSocket] | None = None) -> Iterator[tuple[bytes, Endpoint]]:
        """Everything that has arrived by now, up to a bound; never waits."""
        for sock in self._sockets if sockets is None else sockets:
            failures = 0
            for _ in range(_DRAIN_AT_ONCE):
                try:
                    data, address = sock.recvfrom(_LONGEST)
                except BlockingIOError:
                    break
                except OSError as error:  # an ICMP error of an earlier send, on some systems
                    self.errors[errno.errorcode.get(error.errno or 0, "OSError")] += 1
                    failures += 1
                    if failures >= _ERRORS_IN_A_ROW:
                        break
                    continue
                self.received_datagrams += 1
                self.received_bytes += len(data)
                yield data, Endpoint(address[0], address[1])

    async def readable(self, sock: UdpSocket) -> None:
        """Wait for something to drain."""
        await trio.lowlevel.wait_readable(sock.fileno())

    @property
    def sockets(self) -> Sequence[UdpSocket]:
        return self._sockets

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _failed(self, name: str, to: Endpoint) -> None:
        self.errors[name] += 1
        if name != self._last_error:
            _log.info("sending to %s failed: %s (tried again with the next datagram)", to, name)
        self._last_error = name
