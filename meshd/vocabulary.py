"""The nouns of the mesh: node ids, endpoints, layer ranges, adverts, health.

Everything here is plain immutable data that every other package may import. This module knows nothing of sockets, clocks,
threads or torch, and never will.

Conventions, once for the whole code base:

* layer ranges are half-open; ``0..15`` and ``15..30`` meet;
* units stand in names: ``_s`` and ``_ms`` are durations, ``_bytes`` sizes, ``_mb`` is 2**20 bytes, ``_tokens`` counts;
* ``now`` is monotonic seconds as a float, handed in by whoever owns a clock.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NewType

MB: Final = 1 << 20

NodeId = NewType("NodeId", str)
"""32 lower-case hex characters: the hash of a node's public key. Stable across restarts."""

SessionId = NewType("SessionId", str)
"""32 lower-case hex characters, drawn by the entry for each request."""

_NODE_ID = re.compile(r"[0-9a-f]{32}\Z")
_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_MODEL_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?(@[a-z0-9]+)?\Z")
_NOT_IN_HOST = re.compile(r"[\s/@?#\[\]]")
_HASH_MODEL = re.compile(r"hash:[1-9][0-9]{0,4}\Z")


def is_node_id(text: str) -> bool:
    """True when ``text`` has the form of a node id."""
    return _NODE_ID.match(text) is not None


def is_node_name(text: str) -> bool:
    """True when ``text`` may be a node's label."""
    return _NODE_NAME.match(text) is not None


def stored_name(name: str) -> str:
    """The model whose files a name stands for: ``@dtype`` is how it is computed, and has none of its own."""
    return name.partition("@")[0]


def is_model_name(text: str) -> bool:
    """True when ``text`` may name a model: ``name``, ``org/name``, either with ``@dtype``, or ``hash:L``.

    ``.`` and ``..`` as a path component are refused although their characters are legal: a name is looked up in a registry
    and never used as a path, and this keeps a slip elsewhere from becoming a hole.
    """
    if len(text) > 200:
        return False
    if _HASH_MODEL.match(text):
        return True
    if not _MODEL_NAME.match(text):
        return False
    return all(part.strip(".") for part in stored_name(text).split("/"))


def is_host(text: str) -> bool:
    """True when ``text`` may be a host: a name or a literal. Only an IPv6 literal has a scope (``fe80::1%eth0``): elsewhere a
    ``%`` would make a name of what looks like an address, and looking a name up blocks."""
    return text.isprintable() and _NOT_IN_HOST.search(text) is None and text != "" and ("%" not in text or ":" in text)


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """A host and a port. ``str`` puts IPv6 literals in brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> Endpoint:
        """Read ``host:port``, ``host``, ``::1``, ``[::1]`` or ``[::1]:7001``. Raises ValueError naming the text."""
        raw = text.strip()
        host, port_text = raw, ""
        if raw.startswith("["):
            host, closed, rest = raw[1:].partition("]")
            if not closed or (rest and not rest.startswith(":")):
                raise ValueError(f"{text!r} is not HOST:PORT")
            port_text = rest[1:]
            if rest == ":":
                raise ValueError(f"{text!r} has no port after the colon")
        elif raw.count(":") == 1:
            host, _, port_text = raw.partition(":")
            if not port_text:
                raise ValueError(f"{text!r} has no port after the colon")
        if ":" in host or raw.startswith("["):
            try:
                ipaddress.IPv6Address(host.partition("%")[0])
            except ValueError:
                raise ValueError(f"{text!r} is not HOST:PORT") from None
        if not is_host(host):
            raise ValueError(f"{text!r} is not HOST:PORT")
        if not port_text:
            if default_port is None:
                raise ValueError(f"{text!r} has no port")
            return cls(host, default_port)
        if not (port_text.isascii() and port_text.isdigit()) or not 0 <= int(port_text) <= 65535:
            raise ValueError(f"{text!r}: {port_text!r} is not a port")
        return cls(host, int(port_text))

    @property
    def is_loopback(self) -> bool:
        """True for ``localhost`` and loopback literals; a name that would have to be resolved counts as not."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers ``start`` (inclusive) to ``end`` (exclusive); never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"{self.start}..{self.end} is not a layer range")

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read ``0..15`` or ``0-15``. Raises ValueError naming the text."""
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:\.\.|-)([0-9]{1,6})\s*", text)
        if match is None or int(match[1]) >= int(match[2]):
            raise ValueError(f"{text!r} is not a layer range such as 0..15")
        return cls(int(match[1]), int(match[2]))

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.end

    def covers(self, other: LayerRange) -> bool:
        """True when every layer of ``other`` is held too."""
        return self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        return f"{self.start}..{self.end}"

    def json(self) -> list[int]:
        """``[0, 15]``: how JSON documents spell a range."""
        return [self.start, self.end]

    def signature(self) -> str:
        """``[0:15]``: how route signatures spell a range."""
        return f"[{self.start}:{self.end}]"


class NodeStatus(StrEnum):
    """What a member is believed to be. Only gossip decides it."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"
    DRAINING = "draining"


BARRED: Final = "on the block list"
"""Why a member is not admitted that may be well, but is not wanted."""


@dataclass(frozen=True, slots=True)
class Loading:
    """A range that a node is taking: shown, never routed to."""

    layers: LayerRange
    stage: str  # claimed | fetching | loading | proving
    progress: float  # 0..1


@dataclass(frozen=True, slots=True)
class Capability:
    """What a device says it can do. ``layer_ms`` is measured by its own self-check, per layer."""

    device: str = "cpu"
    capacity_mb: int = 0
    layer_ms_1: float = 0.0  # one decode row
    layer_ms_64: float = 0.0  # a 64-row prefill chunk
    models: tuple[str, ...] = ()  # digests of further models it could give away; no daemon of this version names any


@dataclass(frozen=True, slots=True)
class Advert:
    """What a node says of itself: a signed rumour, changed by its owner only.

    Identity is ``(node_id, epoch, incarnation)``: ``epoch`` orders runs of one device and is persisted, ``incarnation`` is
    raised by the owner within a run, ``generation`` counts engine starts within a run (verdicts and steps name it).
    """

    node_id: NodeId
    name: str
    epoch: int
    incarnation: int
    addresses: tuple[Endpoint, ...]  # where links and gossip reach it, best first
    http: Endpoint | None = None
    version: str = ""
    wire: int = 1
    model: str = ""
    digest: str = ""
    dtype: str = ""
    arith: str = ""
    num_layers: int = 0
    layers: LayerRange | None = None
    generation: int = 0
    loading: Loading | None = None
    capability: Capability = field(default_factory=Capability)
    entry: bool = False  # has a tokenizer: may own requests
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Health:
    """How a node is right now. Steers routing only; never an input of an election."""

    ram_free_mb: int = 0
    ram_total_mb: int = 0
    load1: float = 0.0
    in_flight: int = 0
    queue_depth: int = 0
    tokens_per_s: float = 0.0
    kv_used_mb: int = 0
    kv_total_mb: int = 0
    battery_pct: int | None = None
    on_ac: bool | None = None
    temp_c: float | None = None
    jammed: bool = False

    def json(self) -> dict[str, Any]:
        """The STATUS object of the HTTP interface."""
        return {
            "ram_free_mb": self.ram_free_mb,
            "ram_total_mb": self.ram_total_mb,
            "load1": round(self.load1, 2),
            "in_flight": self.in_flight,
            "queue_depth": self.queue_depth,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "kv_used_mb": self.kv_used_mb,
            "kv_total_mb": self.kv_total_mb,
            "battery_pct": self.battery_pct,
            "on_ac": self.on_ac,
            "temp_c": self.temp_c,
            "jammed": self.jammed,
        }


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model is made of, from its config and tensor headers alone. Sizes are of the checkpoint's dtype.

    ``layer_bytes[i]`` is the weight bytes of layer i; ``embed_bytes`` goes with layer 0, ``head_bytes`` (final norm and
    head) with the last layer: for a tied head that is the embedding again, counted once where one node holds both ends.
    """

    name: str
    digest: str
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    layer_bytes: tuple[int, ...]
    embed_bytes: int
    head_bytes: int
    tied: bool
    kv_bytes_per_token_layer: int
    context: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def whole(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.num_layers)

    def weight_bytes(self, layers: LayerRange) -> int:
        """Weights a node must hold to serve ``layers``: with embedding at the start and norm and head at the end."""
        first, last = layers.start == 0, layers.end == self.num_layers
        total = sum(self.layer_bytes[layers.start : layers.end])
        if first:
            total += self.embed_bytes
        if last:
            total += self.head_bytes - (self.embed_bytes if self.tied and first else 0)
        return total

    def json(self) -> Mapping[str, Any]:
        """The body of ``GET /mesh/model``."""
        return {
            "model": self.name,
            "digest": self.digest,
            "dtype": self.dtype,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "layer_bytes": list(self.layer_bytes),
            "embed_bytes": self.embed_bytes,
            "head_bytes": self.head_bytes,
            "tied": self.tied,
            "kv_bytes_per_token_layer": self.kv_bytes_per_token_layer,
            "context": self.context,
        }


@dataclass(frozen=True, slots=True)
class Hop:
    """One stage of a route: a node and the layers it runs for this session (inside what it holds)."""

    node_id: NodeId
    layers: LayerRange
    generation: int = 0


Route = tuple[Hop, ...]
"""Hops in order; each starts where the previous one ends, the first at 0, the last at the model's end."""
