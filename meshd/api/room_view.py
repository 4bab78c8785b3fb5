"""``GET /mesh/room`` and ``GET /mesh/targets``: the whole room in one document, for dashboards and for Prometheus.

A dashboard asks every second, and ten of them may be open: the document is made at most once in `FRESH_S` for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

from meshd.api import views
from meshd.api.message import dump_json
from meshd.api.node import Node
from meshd.directory import Member
from meshd.doctor.diagnosis import diagnose
from meshd.doctor.finding import Documents
from meshd.doctor.layers import hangs_on
from meshd.vocabulary import NodeStatus

FRESH_S: Final = 0.5
EVENTS: Final = 60


class RoomView:
    """Makes the document, and keeps it for a moment."""

    def __init__(self, node: Node, in_flight: Callable[[], int]) -> None:
        self._node = node
        self._in_flight = in_flight
        self._made: dict[bool, tuple[float, bytes]] = {}

    def body(self, *, events: bool) -> bytes:
        """JSON: ``t, status, peers, hive, routing, findings, what_if`` and, if asked for, the latest ``events``."""
        now = trio.current_time()
        made_at, body = self._made.get(events, (-FRESH_S, b""))
        if now - made_at >= FRESH_S:
            body = dump_json(self._document(events=events))
            self._made[events] = (now, body)
        return body

    def _document(self, *, events: bool) -> dict[str, Any]:
        node = self._node
        view = node.directory(), node.facts(), node.spec()
        recent, t = list(node.events.recent), round(time.time(), 3)
        status, hive = views.status_json(*view, self._in_flight()), views.hive_json(*view)
        peers, routing = views.peers_json(view[0]), node.routing(None)
        documents = Documents.of(status, peers, hive, routing, events=recent, t=t)
        return {
            "t": t,
            "status": status,
            "peers": peers,
            "hive": hive,
            "routing": routing,
            "findings": [finding.json() for finding in diagnose(documents)],
            "what_if": hangs_on(documents),
            **({"events": recent[-EVENTS:]} if events else {}),
        }


def targets(members: Sequence[Member], label: Callable[[Member], str]) -> list[dict[str, Any]]:
    """Prometheus' HTTP discovery: every node that did not leave, dead ones too, so that ``up`` says that they are."""
    found = []
    for member in members:
        endpoint = views.http_of(member)
        if endpoint is None or member.state is NodeStatus.LEFT:
            continue
        labels = {
            "node": label(member),
            "node_id": member.node_id,
            "__meta_meshd_state": str(member.state),
            "__meta_meshd_model": member.advert.model,
            "__meta_meshd_role": views.role_of(member.advert),
            "__meta_meshd_version": member.advert.version,
        }
        found.append({"targets": [str(endpoint)], "labels": labels})
    return found
