"""What the steps of an attempt share (route, sampling, model), and how it travels: as one value of bytes. Pure.

It is the same in every step of a token, so both ends remember the last few: a plan what follows from it, the reader its plans by
their bytes, and a token's step costs neither of them the making or the checking of it again. No end relies on what the other
remembers. The only error is BadFrame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import msgpack

from meshd.errors import BadFrame
from meshd.inference.engine import Sampling
from meshd.links.fields import (
    finite_untrusted,
    integer_untrusted,
    list_untrusted,
    node_untrusted,
    range_untrusted,
    text_untrusted,
    whole_untrusted,
)
from meshd.vocabulary import Hop, LayerRange, NodeId, Route, SessionId, is_node_id

MAX_HOPS: Final = 32
MAX_POSITION: Final = 1 << 24
MAX_TOP: Final = 20
MAX_PLAN_BYTES: Final = 8 << 10
PLANS_KEPT: Final = 128  # of twice as many sessions as a node has by default; 2 kB each
MAX_COUNT: Final = 1 << 40
MAX_DIGEST: Final = 128


@dataclass(frozen=True)  # no slots: what follows from it is kept beside the fields
class Plan:
    """What the steps of an attempt share on their way to one hop. ``route`` begins with the receiver; ``origin`` is the range of
    the sending hop (None: the entry)."""

    session: SessionId
    attempt: int
    prompt_len: int
    digest: str
    num_layers: int
    route: Route
    origin: LayerRange | None
    entry: NodeId
    sampling: Sampling

    @cached_property
    def onward(self) -> Plan:
        """The receiver's plan for its next hop."""
        return replace(self, route=self.route[1:], origin=self.route[0].layers)

    @cached_property
    def packed(self) -> bytes:
        """As it travels."""
        fields = {
            "session": self.session,
            "attempt": self.attempt,
            "prompt_len": self.prompt_len,
            "digest": self.digest,
            "num_layers": self.num_layers,
            "route": [hop_out(hop) for hop in self.route],
            "origin": self.origin.json() if self.origin else None,
            "entry": self.entry,
            "sampling": _sampling_out(self.sampling),
        }
        raw: bytes = msgpack.packb(fields)
        return raw


def hop_out(hop: Hop) -> list[Any]:
    """A hop as plain data."""
    return [hop.node_id, *hop.layers.json(), hop.generation]


def _sampling_out(s: Sampling) -> list[Any]:
    penalties = [s.presence_penalty, s.frequency_penalty, s.repetition_penalty]
    return [s.temperature, s.top_p, s.top_k, s.min_p, s.seed, *penalties, s.logprobs]


@lru_cache(PLANS_KEPT)
def plan_untrusted(raw: bytes) -> Plan:
    """What a peer sent."""
    if len(raw) > MAX_PLAN_BYTES:
        raise BadFrame(f"plan: more than {MAX_PLAN_BYTES} bytes")
    try:
        head = msgpack.unpackb(raw)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(f"plan: not msgpack: {error}") from error
    if not isinstance(head, dict):
        raise BadFrame("plan: not a map")
    num_layers = integer_untrusted(head, "num_layers", 1, 1 << 16)
    origin = origin_untrusted(head)
    route = _route(head, num_layers)
    if (origin.end if origin else 0) != route[0].layers.start:
        raise BadFrame("route: does not start where the sender's layers end")
    return Plan(
        session=session_untrusted(head),
        attempt=integer_untrusted(head, "attempt", 0, MAX_COUNT),
        prompt_len=integer_untrusted(head, "prompt_len", 0, MAX_POSITION),
        digest=text_untrusted(head, "digest", MAX_DIGEST),
        num_layers=num_layers,
        route=route,
        origin=origin,
        entry=node_untrusted(head.get("entry"), "entry"),
        sampling=_sampling(head),
    )


def origin_untrusted(head: Mapping[str, Any]) -> LayerRange | None:
    """The layers that rows come from; None for ids."""
    value = head.get("origin")
    return None if value is None else range_untrusted(value, "origin")


def _route(head: Mapping[str, Any], num_layers: int) -> Route:
    hops: list[Hop] = []
    for item in list_untrusted(head, "route", MAX_HOPS):
        hop = hop_untrusted(item, "route")
        if hops and hops[-1].layers.end != hop.layers.start:
            raise BadFrame("route: a hop does not start where the one before ends")
        hops.append(hop)
    if not hops or hops[-1].layers.end != num_layers:
        raise BadFrame("route: does not end where the model does")
    return tuple(hops)


def session_untrusted(head: Mapping[str, Any]) -> SessionId:
    """The session that a message is about."""
    value = head.get("session")
    if not isinstance(value, str) or not is_node_id(value):  # the same form: 32 hex characters
        raise BadFrame("session: not an id")
    return SessionId(value)


def hop_untrusted(item: object, name: str) -> Hop:
    """The inverse of `hop_out`."""
    if not isinstance(item, list | tuple) or len(item) != 4:
        raise BadFrame(f"{name}: not hops")
    return Hop(
        node_untrusted(item[0], name), range_untrusted(item[1:3], name), whole_untrusted(item[3], name, 0, MAX_COUNT)
    )


def _sampling(head: Mapping[str, Any]) -> Sampling:
    values = list_untrusted(head, "sampling", 9)
    if len(values) != 9:
        raise BadFrame("sampling: not nine values")
    logprobs = values[8]
    return Sampling(
        temperature=finite_untrusted(values[0], "temperature"),
        top_p=finite_untrusted(values[1], "top_p"),
        top_k=whole_untrusted(values[2], "top_k", 0, 1 << 30),
        min_p=finite_untrusted(values[3], "min_p"),
        seed=whole_untrusted(values[4], "seed", -(1 << 63), (1 << 64) - 1),
        presence_penalty=finite_untrusted(values[5], "presence_penalty"),
        frequency_penalty=finite_untrusted(values[6], "frequency_penalty"),
        repetition_penalty=finite_untrusted(values[7], "repetition_penalty"),
        logprobs=None if logprobs is None else whole_untrusted(logprobs, "logprobs", 0, MAX_TOP),
    )
