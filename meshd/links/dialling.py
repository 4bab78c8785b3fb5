"""When to dial a peer again: back-off per node, forgotten as soon as the node is heard of.

Pure. A node that was just seen (an inbound link, a datagram, a new address) is dialled at once, however often it failed
before: a back-off must not outlive the outage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshd.vocabulary import Endpoint, NodeId

FIRST_S: Final = 0.25
LONGEST_S: Final = 8.0
MAX_NODES: Final = 4096


@dataclass(frozen=True, slots=True)
class Failure:
    """Dialling these addresses failed ``times`` in a row; not again before ``until``."""

    addresses: tuple[Endpoint, ...]
    times: int
    until: float
    reason: str


class Backoff:
    """The failures of every node; the oldest are forgotten above `MAX_NODES`."""

    def __init__(self) -> None:
        self._failures: dict[NodeId, Failure] = {}

    def blocks(self, node_id: NodeId, addresses: Sequence[Endpoint], now: float) -> Failure | None:
        """The failure that forbids dialling these addresses now, if there is one."""
        failure = self._failures.get(node_id)
        if failure is None or now >= failure.until or failure.addresses != tuple(addresses):
            return None
        return failure

    def failed(self, node_id: NodeId, addresses: Sequence[Endpoint], reason: str, now: float) -> None:
        """Dialling failed: wait twice as long as last time."""
        last = self._failures.pop(node_id, None)
        times = last.times + 1 if last is not None and last.addresses == tuple(addresses) else 1
        wait_s = min(FIRST_S * 2 ** min(times - 1, 16), LONGEST_S)
        self._failures[node_id] = Failure(tuple(addresses), times, now + wait_s, reason)
        if len(self._failures) > MAX_NODES:
            del self._failures[next(iter(self._failures))]

    def heard(self, node_id: NodeId) -> None:
        """The node lives: dial it whenever wanted."""
        self._failures.pop(node_id, None)
