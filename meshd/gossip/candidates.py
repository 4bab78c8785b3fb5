"""Addresses worth trying: from ``--join``, remembered peers, mDNS. They are hints; whoever answers is the member.

Bounded; an address that turned out to be our own, or is a live member's already, is not tried; it need not be one that the
member tells of itself. Which are our own is found out anew when our addresses change: what was ours may be a peer's now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from meshd.vocabulary import Endpoint, NodeId

MAX_CANDIDATES: Final = 256


class Candidates:
    """Endpoint -> how it came to us; the first way wins, ``join`` over all."""

    def __init__(self) -> None:
        self._via: dict[Endpoint, str] = {}
        self._own: set[Endpoint] = set()
        self._owner: dict[Endpoint, NodeId] = {}  # of those in ``_via`` where somebody answered

    def add(self, endpoints: Iterable[Endpoint], via: str) -> list[Endpoint]:
        """Those that are new and worth a try."""
        new = [e for e in dict.fromkeys(endpoints) if e not in self._via]
        for endpoint in new:
            if len(self._via) >= MAX_CANDIDATES and not self._make_room():
                break
            self._via[endpoint] = via
        return [e for e in new if e in self._via and e not in self._own]

    def remove(self, endpoints: Iterable[Endpoint], via: str) -> None:
        """They went away again, where they came from."""
        for endpoint in endpoints:
            if self._via.get(endpoint) == via:
                self._forget(endpoint)

    def answered(self, endpoint: Endpoint, node_id: NodeId) -> None:
        """That node lives there."""
        if endpoint in self._via:
            self._owner[endpoint] = node_id

    def ours(self, endpoint: Endpoint) -> None:
        """That was ourselves."""
        if len(self._own) < MAX_CANDIDATES:
            self._own.add(endpoint)

    def moved(self) -> None:
        """Our addresses changed."""
        self._own.clear()

    def via(self, endpoints: Iterable[Endpoint]) -> str | None:
        """How a member at these addresses was first heard of, if we had looked for it."""
        return next((self._via[e] for e in endpoints if e in self._via), None)

    def unmet(self, met: Collection[Endpoint], lives: Callable[[NodeId], bool]) -> list[Endpoint]:
        """Those that no live member answers at."""
        answering = {e for e, owner in self._owner.items() if lives(owner)}
        return [e for e in self._via if e not in met and e not in self._own and e not in answering]

    def _make_room(self) -> bool:
        """Drop the oldest that nobody asked for by name."""
        for endpoint, via in self._via.items():
            if via not in ("join", "next"):
                self._forget(endpoint)
                return True
        return False

    def _forget(self, endpoint: Endpoint) -> None:
        del self._via[endpoint]
        self._owner.pop(endpoint, None)
