"""What the doctor reads and what it says: documents in, findings out.

A finding names what is wrong, why it matters and the command that cures it. Names and addresses in commands come from other
nodes, so they are quoted for a shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """``code`` is stable. ``nodes`` are the names it is about. ``command`` can be pasted into a shell."""

    code: str
    severity: Severity
    text: str
    remedy: str
    command: str
    nodes: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """As it stands in documents."""
        return {
            "code": self.code,
            "severity": self.severity,
            "text": self.text,
            "remedy": self.remedy,
            "command": self.command,
            "nodes": list(self.nodes),
        }


@dataclass(frozen=True, slots=True)
class Probe:
    """What came of trying a peer's advertised addresses from here. ``http`` and ``mesh``: ``ok``, ``refused``, ``timeout``,
    another error's text, or "" where it was not tried. ``clock_offset_s``: the peer's clock minus ours."""

    name: str
    http: str = ""
    mesh: str = ""
    clock_offset_s: float | None = None


@dataclass(frozen=True, slots=True)
class Documents:
    """One node's view. ``peers`` is the list of PEER objects without the node itself, which is ``me``; ``t`` is what its clock
    said then, as in its events."""

    status: Document
    me: Document
    peers: Sequence[Document]
    hive: Document
    routing: Document = field(default_factory=dict)
    events: Sequence[Document] = ()
    probes: Sequence[Probe] = ()
    t: float = 0.0

    @classmethod
    def of(
        cls,
        status: Document,
        peers: Document,
        hive: Document,
        routing: Document,
        *,
        events: Sequence[Document] = (),
        probes: Sequence[Probe] = (),
        t: float = 0.0,
    ) -> Documents:
        """From the bodies as they are served."""
        return cls(status, peers.get("self") or {}, peers.get("peers") or (), hive, routing, events, probes, t)

    @property
    def everybody(self) -> list[Document]:
        """The node itself first, then its peers."""
        return [self.me, *self.peers] if self.me else list(self.peers)

    @property
    def present(self) -> list[Document]:
        """Who is here: alive, suspect or draining."""
        return [peer for peer in self.everybody if peer.get("state") in ("alive", "suspect", "draining")]

    @property
    def serving(self) -> list[Document]:
        """Who is here with layers of the room's model."""
        digest = self.hive.get("digest")
        return [peer for peer in self.present if peer.get("layers") and peer.get("digest") == digest]


def shell(*words: str) -> str:
    """A command line whose words are safe to paste."""
    return shlex.join(words)


def at(peer: Document) -> tuple[str, ...]:
    """``--url`` of a node, where it says one."""
    return ("--url", str(peer["http"])) if peer.get("http") else ()


def span(layers: Sequence[int]) -> str:
    """``15..30``."""
    return f"{layers[0]}..{layers[1]}"


def status_of(peer: Document) -> Document:
    """A peer's STATUS object, empty where it has told none."""
    return peer.get("status") or {}
