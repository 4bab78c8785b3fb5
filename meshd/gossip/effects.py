"""What a core asks its shell to do. Plain data; the core never waits for any of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshd.vocabulary import Endpoint, NodeId


@dataclass(frozen=True, slots=True)
class Send:
    """Seal ``payload`` and send it to ``to``; a failure to send is the network's loss, not an error."""

    to: Endpoint
    payload: bytes


@dataclass(frozen=True, slots=True)
class Check:
    """Ask ``node`` over TCP whether it lives; report with ``core.checked``."""

    node: NodeId
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Push-pull with ``node``, or with whoever owns one of ``endpoints``; drive it with ``core.exchange_*``."""

    node: NodeId | None
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """Who is there, in what state, or with what advert changed."""


@dataclass(frozen=True, slots=True)
class Event:
    """A line for the event log: join, failed, left, suspect, refute, conflict, pause."""

    name: str
    node: NodeId
    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)


Effect = Send | Check | Exchange | Changed | Event
