"""How much of this device one client, or all of them, may take up over HTTP: the numbers, and the counters that hold them.

Pure: no socket, no clock. Every counter is taken and given back by a context manager, so none can leak.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshd.errors import Busy
from meshd.vocabulary import MB


@dataclass(frozen=True, slots=True)
class Limits:
    """``connections`` are served in full; ``reserve`` more say what they want and wait for a place, or have a health check
    answered, so that a full node still says that it lives. ``header_s`` bounds sending a request's head, ``body_s`` its body
    beyond ``body_rate`` bytes a second, ``idle_s`` the time between two requests, ``write_s`` each write that the client does
    not take, ``linger_s`` the wait for a client to read a refusal while it is still sending."""

    head_bytes: int = 16 * 1024
    target_bytes: int = 8 * 1024
    body_bytes: int = 8 * MB
    all_bodies_bytes: int = 256 * MB
    connections: int = 256
    reserve: int = 256
    header_s: float = 10.0
    body_s: float = 15.0
    body_rate: int = 64 * 1024
    idle_s: float = 60.0
    write_s: float = 30.0
    linger_s: float = 2.0
    grace_s: float = 5.0


class Budget:
    """A bounded amount that several holders share. ``what`` names it in the refusal."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self.used = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """A holder's part; whatever it took is given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.used -= share.taken

    def take(self, amount: int) -> None:
        """Count ``amount`` in, or raise Busy."""
        if self.used + amount > self._limit:
            raise Busy(f"this node has no room for more {self._what} now")
        self.used += amount


class Share:
    """What one holder has taken of a `Budget`."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.taken = 0

    def grow(self, amount: int) -> None:
        """Take more, or raise Busy and take nothing."""
        self._budget.take(amount)
        self.taken += amount
