"""Byte streams that can be written to without waiting: what a link is driven on.

Owns the sending end of a connection: what the kernel takes goes out within `Transport.write`, the rest waits for `drain`. So
whoever has something to say says it at once, and only a connection that does not keep up needs a task that waits for it.
Waking a task to write costs more than the write (measured: 40 of 55 us). Knows nothing of frames.

Invariants: bytes leave in the order of the writes; a cancelled `drain` loses nothing. One caller reads and one drains. As
trio's streams, all of them raise BrokenResourceError for a connection that is gone and ClosedResourceError for one that was
closed here; a TLS error is the cause of the former.
"""

from __future__ import annotations

import os
import ssl
from abc import abstractmethod
from typing import Final

import trio

READ_BYTES: Final = 64 << 10  # below what malloc takes from the kernel and gives back each time
RECORD_BYTES: Final = 16 << 10  # TLS gives no more at once
Buffer = bytes | bytearray | memoryview


class Transport(trio.abc.Stream):
    """A trio stream with `write`."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Take all of ``data`` and send what goes without waiting."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """True while something waits for `drain`: write no more before that."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until everything is sent."""

    async def send_all(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.write(data)
        await self.drain()

    async def wait_send_all_might_not_block(self) -> None:
        await self.drain()


def transport_of(stream: trio.abc.Stream) -> Transport:
    """The transport over any trio stream."""
    if isinstance(stream, Transport):
        return stream
    return SocketTransport(stream) if isinstance(stream, trio.SocketStream) else PatientTransport(stream)


class SocketTransport(Transport):
    """A connected socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._socket = stream.socket
        self._rest: Buffer = b""

    @property
    def pending(self) -> bool:
        return bool(self._rest)

    def write(self, data: Buffer) -> None:
        if self._rest:
            self._rest = bytes(self._rest) + data
            return
        try:
            sent = os.write(self._descriptor(), data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error
        if sent < len(data):
            self._rest = memoryview(data)[sent:]

    async def drain(self) -> None:
        while self._rest:
            await trio.lowlevel.wait_writable(self._socket)
            rest, self._rest = self._rest, b""
            self.write(rest)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return os.read(self._descriptor(), max_bytes or READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _descriptor(self) -> int:
        """Trio's sockets have no calls that do not wait, so the descriptor is used as it is: it is non-blocking."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise trio.ClosedResourceError("this socket was closed here")
        return descriptor


class TlsTransport(Transport):
    """TLS over a socket. `do_handshake` comes first."""

    def __init__(self, stream: trio.SocketStream, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._carrier = SocketTransport(stream)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)

    async def do_handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._send_outgoing()
                await self._fetch()
            except ssl.SSLError as error:
                raise trio.BrokenResourceError(str(error)) from error
            else:
                await self._send_outgoing()
                return

    def certificate(self) -> bytes:
        """The peer's, in DER; empty when it showed none."""
        return self._tls.getpeercert(binary_form=True) or b""

    @property
    def pending(self) -> bool:
        return self._carrier.pending

    def write(self, data: Buffer) -> None:
        try:
            sent = self._tls.write(data)
            while sent < len(data):
                sent += self._tls.write(memoryview(data)[sent:])
        except ssl.SSLError as error:
            raise trio.BrokenResourceError(str(error)) from error
        self._carrier.write(self._outgoing.read())

    async def drain(self) -> None:
        await self._carrier.drain()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while True:
            data = self._decrypt(max_bytes or READ_BYTES)
            if data is not None:
                return data
            await self._fetch()

    async def aclose(self) -> None:
        await self._carrier.aclose()

    def _decrypt(self, most_bytes: int) -> bytes | None:
        """What has come of whole records; empty after the peer's end, None when a record is missing."""
        records: list[bytes] = []
        left = most_bytes
        try:
            while left > 0 and (self._incoming.pending or self._tls.pending() or self._incoming.eof):
                records.append(self._tls.read(min(left, RECORD_BYTES)))
                left -= len(records[-1])
        except ssl.SSLWantReadError:
            pass  # half a record
        except ssl.SSLZeroReturnError:
            return b"".join(records)
        except ssl.SSLError as error:
            if not records:  # else the next call meets it again
                raise trio.BrokenResourceError(str(error)) from error
        return b"".join(records) if records else None

    async def _fetch(self) -> None:
        data = await self._carrier.receive_some(READ_BYTES)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _send_outgoing(self) -> None:
        self._carrier.write(self._outgoing.read())
        await self._carrier.drain()


class PatientTransport(Transport):
    """Any other trio stream: takes a write and sends it in `drain`."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._rest = b""

    @property
    def pending(self) -> bool:
        return bool(self._rest)

    def write(self, data: Buffer) -> None:
        self._rest += data

    async def drain(self) -> None:
        await self._stream.send_all(self._rest)
        self._rest = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes or READ_BYTES)

    async def aclose(self) -> None:
        await self._stream.aclose()


class ClosedTransport(Transport):
    """What a link keeps of a connection that is gone. Errors and their frames may hold a link until cycles are collected; the
    buffers of TLS, 70 kB a connection, go at once."""

    @property
    def pending(self) -> bool:
        return False

    def write(self, _data: Buffer) -> None:
        raise trio.ClosedResourceError("this connection was closed here")

    async def drain(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, _max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        raise trio.ClosedResourceError("this connection was closed here")

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
