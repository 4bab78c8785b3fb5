"""Chain messages on a link: heads of plain msgpack data, rows as the body. Pure.

`to_wire` and `from_wire_untrusted` are inverses. Everything that comes in is checked field by field before anything is built
from it; the only error is BadFrame, which names the field. A step's body is its rows, then its history as int32 (too long for
a head).

What is the same in every step of an attempt (route, sampling, model) travels as one value of bytes, its ``plan``. Both ends
remember the last few by content, so a token's step costs neither of them the making or the checking of it again; no end relies
on what the other remembers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgpack

from meshd.chain.messages import (
    MAX_HOPS,
    Ask,
    ChainMessage,
    End,
    Fill,
    Lost,
    Need,
    Open,
    Opened,
    Phase,
    Progress,
    Reply,
    Step,
    Trace,
    Why,
)
from meshd.errors import BadFrame
from meshd.inference.engine import Choice, Sampling
from meshd.links.wire import Message
from meshd.vocabulary import Hop, LayerRange, NodeId, Route, SessionId, is_node_id

PREFIX: Final = "chain."
MAX_POSITION: Final = 1 << 24
MAX_ROWS: Final = 4096  # in one message
MAX_CHOICES: Final = 64
MAX_TOP: Final = 20
MAX_GUESS: Final = 32  # more than anybody sends
MAX_DETAIL: Final = 200
MAX_PLAN_BYTES: Final = 8 << 10
PLANS_KEPT: Final = 512
_MAX_COUNT: Final = 1 << 40
_E = TypeVar("_E", bound=StrEnum)


# --- out --------------------------------------------------------------------------------------------------------------


def to_wire(message: ChainMessage) -> Message:
    """The link message for ``message``."""
    head: dict[str, Any]
    body = b""
    match message:
        case Step():
            kind, head = "step", _step_head(message)
            body = message.rows + struct.pack(f"<{len(message.history)}i", *message.history)
        case Fill():
            kind, body = "fill", message.rows
            head = {**_key(message), "layers": message.layers.json(), "start": message.start, "n": message.n}
        case Need():
            kind, head = "need", {**_key(message), "layers": message.layers.json(), "have": message.have}
            head |= {"origin": message.origin.json() if message.origin else None, "upto": message.upto}
        case Reply():
            kind, head = "reply", {**_key(message), "end": message.end, "prepared": message.prepared}
            head |= {"choices": [_choice_out(choice) for choice in message.choices], "trail": _trail_out(message.trail)}
            head |= _ids_out("guess", message.guess)
        case Lost():
            kind, head = "lost", {"session": message.session, "attempt": message.attempt, "node": message.node}
            head |= {"layers": message.layers.json(), "why": str(message.why), "detail": message.detail[:MAX_DETAIL]}
        case Ask():
            kind, head = "ask", _key(message)
        case Progress():
            kind, head = "progress", {**_key(message), "layers": message.layers.json()}
            head |= {"phase": str(message.phase), "have": message.have}
        case Open():
            kind, body = "open", message.ids
            head = {"session": message.session, "attempt": message.attempt, "hop": _hop_out(message.hop)}
            head |= {"digest": message.digest, "tenant": message.tenant, "reserve": message.reserve_tokens}
        case Opened():
            kind, head = "opened", {"session": message.session, "attempt": message.attempt}
            head |= {"layers": message.layers.json(), "have": message.have}
        case End():
            kind, head = "end", {"session": message.session, "attempt": message.attempt}
    return Message(PREFIX + kind, head, body)


def _key(message: Fill | Need | Reply | Ask | Progress) -> dict[str, Any]:
    return {"session": message.session, "attempt": message.attempt, "seq": message.seq}


def _step_head(step: Step) -> dict[str, Any]:
    plan = _Plan(
        step.session,
        step.attempt,
        step.prompt_len,
        step.digest,
        step.num_layers,
        step.route,
        step.origin,
        step.entry,
        step.sampling,
    )
    return {
        "plan": _packed(plan),
        "seq": step.seq,
        "start": step.start,
        "n": step.n,
        "emit": step.emit,
        "remaining_ms": step.remaining_ms,
        "reserve": step.reserve_tokens,
        "history": len(step.history),
        "trail": _trail_out(step.trail),
        **_ids_out("guess", step.guess),
        **_ids_out("recent", step.recent),
    }


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the steps of an attempt share on their way to one hop."""

    session: SessionId
    attempt: int
    prompt_len: int
    digest: str
    num_layers: int
    route: Route
    origin: LayerRange | None
    entry: NodeId
    sampling: Sampling


@lru_cache(PLANS_KEPT)
def _packed(plan: _Plan) -> bytes:
    fields = {
        "session": plan.session,
        "attempt": plan.attempt,
        "prompt_len": plan.prompt_len,
        "digest": plan.digest,
        "num_layers": plan.num_layers,
        "route": [_hop_out(hop) for hop in plan.route],
        "origin": plan.origin.json() if plan.origin else None,
        "entry": plan.entry,
        "sampling": _sampling_out(plan.sampling),
    }
    packed: bytes = msgpack.packb(fields)
    return packed


def _hop_out(hop: Hop) -> list[Any]:
    return [hop.node_id, *hop.layers.json(), hop.generation]


def _sampling_out(s: Sampling) -> list[Any]:
    penalties = [s.presence_penalty, s.frequency_penalty, s.repetition_penalty]
    return [s.temperature, s.top_p, s.top_k, s.min_p, s.seed, *penalties, s.logprobs]


def _trail_out(trail: tuple[Trace, ...]) -> list[list[float]]:
    return [[round(t.compute_ms, 3), round(t.hold_ms, 3), t.filled, t.windows] for t in trail]


def _ids_out(name: str, ids: tuple[int, ...]) -> dict[str, list[int]]:
    """Nothing for none: most steps have none."""
    return {name: list(ids)} if ids else {}


def _choice_out(c: Choice) -> list[Any]:
    return [c.position, c.token, c.argmax, c.logit, c.logprob, [list(pair) for pair in c.top]]


# --- in ---------------------------------------------------------------------------------------------------------------


def from_wire_untrusted(message: Message) -> ChainMessage:
    """What a peer sent. Raises BadFrame."""
    read = _READERS.get(message.kind)
    if read is None:
        raise BadFrame(f"{message.kind[:40]!r} is not a chain message")
    return read(message.head, message.body)


def _step(head: Mapping[str, Any], body: bytes) -> Step:
    packed = head.get("plan")
    if not isinstance(packed, bytes) or len(packed) > MAX_PLAN_BYTES:
        raise BadFrame(f"plan: not bytes, or more than {MAX_PLAN_BYTES}")
    plan = _plan_untrusted(packed)
    n, start = _int(head, "n", 0, MAX_ROWS), _int(head, "start", 0, MAX_POSITION)
    history = _int(head, "history", 0, MAX_POSITION)
    if 4 * history > len(body):
        raise BadFrame("history: longer than the body")
    split = len(body) - 4 * history
    return Step(
        session=plan.session,
        attempt=plan.attempt,
        seq=_int(head, "seq", 0, _MAX_COUNT),
        start=start,
        n=n,
        emit=_int(head, "emit", 0, min(n, MAX_CHOICES)),
        prompt_len=plan.prompt_len,
        digest=plan.digest,
        num_layers=plan.num_layers,
        route=plan.route,
        origin=plan.origin,
        entry=plan.entry,
        remaining_ms=_int(head, "remaining_ms", 0, 1 << 32),
        reserve_tokens=_int(head, "reserve", 0, MAX_POSITION),
        sampling=plan.sampling,
        history=struct.unpack(f"<{history}i", body[split:]),
        trail=_trail(head),
        rows=body[:split],
        guess=_ids(head, "guess", min(n, MAX_GUESS)),
        recent=_ids(head, "recent", min(start, MAX_GUESS)),
    )


@lru_cache(PLANS_KEPT)
def _plan_untrusted(packed: bytes) -> _Plan:
    try:
        head = msgpack.unpackb(packed)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(f"plan: not msgpack: {error}") from error
    if not isinstance(head, dict):
        raise BadFrame("plan: not a map")
    num_layers = _int(head, "num_layers", 1, 1 << 16)
    origin = _optional_range(head, "origin")
    route = _route(head, num_layers)
    if (origin.end if origin else 0) != route[0].layers.start:
        raise BadFrame("route: does not start where the sender's layers end")
    return _Plan(
        session=_session(head),
        attempt=_int(head, "attempt", 0, _MAX_COUNT),
        prompt_len=_int(head, "prompt_len", 0, MAX_POSITION),
        digest=_text(head, "digest", 128),
        num_layers=num_layers,
        route=route,
        origin=origin,
        entry=_node(head.get("entry"), "entry"),
        sampling=_sampling(head),
    )


def _fill(head: Mapping[str, Any], body: bytes) -> Fill:
    return Fill(
        session=_session(head),
        attempt=_int(head, "attempt", 0, _MAX_COUNT),
        seq=_int(head, "seq", 0, _MAX_COUNT),
        layers=_range(head.get("layers"), "layers"),
        start=_int(head, "start", 0, MAX_POSITION),
        n=_int(head, "n", 1, MAX_ROWS),
        rows=body,
    )


def _need(head: Mapping[str, Any], _body: bytes) -> Need:
    have = _int(head, "have", 0, MAX_POSITION)
    return Need(
        session=_session(head),
        attempt=_int(head, "attempt", 0, _MAX_COUNT),
        seq=_int(head, "seq", 0, _MAX_COUNT),
        layers=_range(head.get("layers"), "layers"),
        origin=_optional_range(head, "origin"),
        have=have,
        upto=_int(head, "upto", have + 1, MAX_POSITION),
    )


def _reply(head: Mapping[str, Any], _body: bytes) -> Reply:
    return Reply(
        session=_session(head),
        attempt=_int(head, "attempt", 0, _MAX_COUNT),
        seq=_int(head, "seq", 0, _MAX_COUNT),
        end=_int(head, "end", 0, MAX_POSITION),
        choices=tuple(_choice(item) for item in _list(head, "choices", MAX_CHOICES)),
        trail=_trail(head),
        prepared=head.get("prepared") is True,
        guess=_ids(head, "guess", MAX_GUESS),
    )


def _lost(head: Mapping[str, Any], _body: bytes) -> Lost:
    return Lost(
        session=_session(head),
        attempt=_int(head, "attempt", 0, _MAX_COUNT),
        node=_node(head.get("node"), "node"),
        layers=_range(head.get("layers"), "layers"),
        why=_enum(Why, head, "why"),
        detail=_text(head, "detail", MAX_DETAIL),
    )


def _ask(head: Mapping[str, Any], _body: bytes) -> Ask:
    return Ask(_session(head), _int(head, "attempt", 0, _MAX_COUNT), _int(head, "seq", 0, _MAX_COUNT))


def _progress(head: Mapping[str, Any], _body: bytes) -> Progress:
    return Progress(
        session=_session(head),
        attempt=_int(head, "attempt", 0, _MAX_COUNT),
        seq=_int(head, "seq", 0, _MAX_COUNT),
        layers=_range(head.get("layers"), "layers"),
        phase=_enum(Phase, head, "phase"),
        have=_int(head, "have", 0, MAX_POSITION),
    )


def _open(head: Mapping[str, Any], body: bytes) -> Open:
    if len(body) % 4 or len(body) > 4 * MAX_POSITION:
        raise BadFrame("ids: half an id, or too many")
    return Open(
        session=_session(head),
        attempt=_int(head, "attempt", 0, _MAX_COUNT),
        hop=_hop(head.get("hop"), "hop"),
        digest=_text(head, "digest", 128),
        tenant=_text(head, "tenant", 128),
        reserve_tokens=_int(head, "reserve", 0, MAX_POSITION),
        ids=body,
    )


def _opened(head: Mapping[str, Any], _body: bytes) -> Opened:
    layers = _range(head.get("layers"), "layers")
    return Opened(_session(head), _int(head, "attempt", 0, _MAX_COUNT), layers, _int(head, "have", 0, MAX_POSITION))


def _end(head: Mapping[str, Any], _body: bytes) -> End:
    return End(_session(head), _int(head, "attempt", 0, _MAX_COUNT))


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], bytes], ChainMessage]]] = {
    "chain.step": _step,
    "chain.fill": _fill,
    "chain.need": _need,
    "chain.reply": _reply,
    "chain.lost": _lost,
    "chain.ask": _ask,
    "chain.progress": _progress,
    "chain.end": _end,
    "chain.open": _open,
    "chain.opened": _opened,
}


# --- fields -----------------------------------------------------------------------------------------------------------


def _int(head: Mapping[str, Any], name: str, low: int, high: int) -> int:
    return _checked_int(head.get(name), name, low, high)


def _checked_int(value: object, name: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadFrame(f"{name}: not an integer in {low}..{high}")
    return value


def _float(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise BadFrame(f"{name}: not a finite number")
    return float(value)


def _text(head: Mapping[str, Any], name: str, longest: int) -> str:
    value = head.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise BadFrame(f"{name}: not a text of at most {longest} characters")
    return value


def _enum(kind: type[_E], head: Mapping[str, Any], name: str) -> _E:
    value = _text(head, name, 20)
    try:
        return kind(value)
    except ValueError:
        raise BadFrame(f"{name}: {value!r} is unknown") from None


def _list(head: Mapping[str, Any], name: str, longest: int) -> list[Any]:
    value = head.get(name)
    if not isinstance(value, list | tuple) or len(value) > longest:
        raise BadFrame(f"{name}: not a list of at most {longest}")
    return list(value)


def _session(head: Mapping[str, Any]) -> SessionId:
    value = head.get("session")
    if not isinstance(value, str) or not is_node_id(value):  # the same form: 32 hex characters
        raise BadFrame("session: not an id")
    return SessionId(value)


def _node(value: object, name: str) -> NodeId:
    if not isinstance(value, str) or not is_node_id(value):
        raise BadFrame(f"{name}: not a node id")
    return NodeId(value)


def _range(value: object, name: str) -> LayerRange:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise BadFrame(f"{name}: not a layer range")
    start = _checked_int(value[0], name, 0, 1 << 16)
    return LayerRange(start, _checked_int(value[1], name, start + 1, 1 << 16))


def _optional_range(head: Mapping[str, Any], name: str) -> LayerRange | None:
    value = head.get(name)
    return None if value is None else _range(value, name)


def _route(head: Mapping[str, Any], num_layers: int) -> Route:
    hops: list[Hop] = []
    for item in _list(head, "route", MAX_HOPS):
        hop = _hop(item, "route")
        if hops and hops[-1].layers.end != hop.layers.start:
            raise BadFrame("route: a hop does not start where the one before ends")
        hops.append(hop)
    if not hops or hops[-1].layers.end != num_layers:
        raise BadFrame("route: does not end where the model does")
    return tuple(hops)


def _hop(item: object, name: str) -> Hop:
    if not isinstance(item, list | tuple) or len(item) != 4:
        raise BadFrame(f"{name}: not hops")
    return Hop(_node(item[0], name), _range(item[1:3], name), _checked_int(item[3], name, 0, _MAX_COUNT))


def _sampling(head: Mapping[str, Any]) -> Sampling:
    values = _list(head, "sampling", 9)
    if len(values) != 9:
        raise BadFrame("sampling: not nine values")
    logprobs = values[8]
    return Sampling(
        temperature=_float(values[0], "temperature"),
        top_p=_float(values[1], "top_p"),
        top_k=_checked_int(values[2], "top_k", 0, 1 << 30),
        min_p=_float(values[3], "min_p"),
        seed=_checked_int(values[4], "seed", -(1 << 63), (1 << 64) - 1),
        presence_penalty=_float(values[5], "presence_penalty"),
        frequency_penalty=_float(values[6], "frequency_penalty"),
        repetition_penalty=_float(values[7], "repetition_penalty"),
        logprobs=None if logprobs is None else _checked_int(logprobs, "logprobs", 0, MAX_TOP),
    )


def _trail(head: Mapping[str, Any]) -> tuple[Trace, ...]:
    trail = []
    for item in _list(head, "trail", MAX_HOPS):
        if not isinstance(item, list | tuple) or len(item) < 3:
            raise BadFrame("trail: not traces")
        filled = _checked_int(item[2], "trail", 0, MAX_POSITION)
        windows = len(item) > 3 and item[3] is True
        trail.append(Trace(_float(item[0], "trail"), _float(item[1], "trail"), filled, windows))
    return tuple(trail)


def _ids(head: Mapping[str, Any], name: str, longest: int) -> tuple[int, ...]:
    if name not in head:
        return ()
    return tuple(_checked_int(item, name, 0, 1 << 31) for item in _list(head, name, longest))


def _choice(item: object) -> Choice:
    if not isinstance(item, list | tuple) or len(item) != 6 or not isinstance(item[5], list | tuple):
        raise BadFrame("choices: not a choice")
    if len(item[5]) > MAX_TOP:
        raise BadFrame("choices: too many alternatives")
    top = []
    for pair in item[5]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadFrame("choices: not an alternative")
        top.append((_checked_int(pair[0], "choices", 0, 1 << 31), _float(pair[1], "choices")))
    return Choice(
        position=_checked_int(item[0], "choices", 0, MAX_POSITION),
        token=_checked_int(item[1], "choices", 0, 1 << 31),
        argmax=_checked_int(item[2], "choices", 0, 1 << 31),
        logit=_float(item[3], "choices"),
        logprob=None if item[4] is None else _float(item[4], "choices"),
        top=tuple(top),
    )
