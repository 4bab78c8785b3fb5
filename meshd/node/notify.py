"""Tells the service manager how this daemon is: systemd's notification protocol, with the standard library alone.

Datagrams of ``KEY=VALUE`` lines to the socket that ``NOTIFY_SOCKET`` names. Where there is none nothing is sent. A manager
that does not listen costs a datagram, never an error: sending does not wait.

``WATCHDOG=1`` comes from a task of the event loop, so it stops exactly when the loop does; the manager then starts us anew.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

import trio

_LONGEST_STATUS: Final = 200
_STATUS_S: Final = 5.0


class Notifier:
    """One daemon's line to its manager. A context manager that closes the socket."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._address else None
        if self._socket is not None:
            self._socket.setblocking(False)
        self.watchdog_s = _watchdog_s(environ)

    def __enter__(self) -> Notifier:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def send(self, **fields: str | int) -> None:
        """``READY=1``, ``STATUS=…``, ``STOPPING=1``; never waits, never fails."""
        if self._socket is not None:
            text = "\n".join(f"{key}={str(value)[:_LONGEST_STATUS]}" for key, value in fields.items())
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)

    async def run(self, status: Callable[[], str]) -> None:
        """Feed the watchdog twice in its time and tell ``status`` when it changes, until cancelled."""
        if self._socket is None:
            return
        told = ""
        while True:
            line = " ".join(status().split())
            if line != told:
                told = line
                self.send(STATUS=line)
            if self.watchdog_s is not None:
                self.send(WATCHDOG=1)
            await trio.sleep(min(_STATUS_S, (self.watchdog_s or 2 * _STATUS_S) / 2))


def _address(text: str) -> str:
    """A path, or an abstract name (@ stands for the zero byte); "" for anything else, such as a vsock."""
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else ""


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """How often the manager wants to hear of us; None: not at all, or not from this process."""
    limit, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not limit.isdigit() or int(limit) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(limit) / 1e6
