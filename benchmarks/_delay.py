"""A switch that keeps every frame for a while: for links that are slow to answer and fast to carry.

Takes the place of a lab's bridge: one thread reads the frames of all ports and hands each, ``delay_s`` later, to all other ports,
as a hub does. Ports and hosts must compute their checksums themselves, so what the kernel would leave to a card is switched off.
Linux, root. Units: seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

from meshd.cli.chaos.netlab import NetLab, tool

_EVERY_PROTOCOL = 0x0003
_OUTGOING = 4  # packet type: what we sent ourselves
_FRAME_BYTES = 65600
_ETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x15, 0x19, 0x1F, 0x24, 0x2C)  # ETHTOOL_S{TXCSUM,RXCSUM,SG,TSO,GSO,GRO} of <linux/ethtool.h>


@contextlib.contextmanager
def delayed(net: NetLab, delay_s: float) -> Iterator[None]:
    """While inside, frames between the hosts of ``net`` take ``delay_s`` each way."""
    for host in range(net.hosts):
        with net.inside(host):
            _compute_checksums("eth0")
    ports = []
    with net.inside(None):
        for host in range(net.hosts):
            _compute_checksums(f"p{host}")
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
            port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            port.bind((f"p{host}", 0))
            port.setblocking(False)
            ports.append(port)
            tool("ip", "link", "set", f"p{host}", "nomaster")
    done = threading.Event()
    thread = threading.Thread(target=_carry, args=(ports, delay_s, done), name="delaying switch")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for port in ports:
            port.close()


def _carry(ports: list[socket.socket], delay_s: float, done: threading.Event) -> None:
    poll = select.epoll()
    for port in ports:
        poll.register(port.fileno(), select.EPOLLIN)
    by_number = {port.fileno(): port for port in ports}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while not done.is_set():
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, source, frame = heapq.heappop(waiting)
            for number, port in by_number.items():
                if number != source:
                    with contextlib.suppress(OSError):  # a full port loses frames, as ports do
                        port.send(frame)
        wait_s = min(0.1, waiting[0][0] - now) if waiting else 0.1
        for number, _ in poll.poll(wait_s):
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame, address = by_number[number].recvfrom(_FRAME_BYTES)
                    if address[2] != _OUTGOING:
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + delay_s, count, number, frame))
    poll.close()


def _compute_checksums(device: str) -> None:
    """Nothing of ``device`` is left to a card."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sQ16x", device.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # not every device has every one
                fcntl.ioctl(any_socket, _ETHTOOL, request)
