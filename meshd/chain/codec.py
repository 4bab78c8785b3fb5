"""Chain messages on a link: heads of plain msgpack data, rows as the body. Pure.

`to_wire` and `from_wire_untrusted` are inverses. Everything that comes in is checked field by field before anything is built
from it; the only error is BadFrame, which names the field. A step's body is its rows, then its history as int32 (too long for
a head).

What is the same in every step of an attempt travels as one value of bytes, its ``plan`` (`plan`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from meshd.chain.messages import (
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
from meshd.chain.plan import (
    MAX_COUNT,
    MAX_DIGEST,
    MAX_HOPS,
    MAX_POSITION,
    MAX_TOP,
    hop_out,
    hop_untrusted,
    origin_untrusted,
    plan_untrusted,
    session_untrusted,
)
from meshd.errors import BadFrame
from meshd.inference.engine import Choice
from meshd.links.fields import (
    finite_untrusted,
    integer_untrusted,
    layers_untrusted,
    list_untrusted,
    node_untrusted,
    text_untrusted,
    whole_untrusted,
    word_untrusted,
)
from meshd.links.wire import Message

PREFIX: Final = "chain."
MAX_ROWS: Final = 4096  # in one message
MAX_CHOICES: Final = 64
MAX_GUESS: Final = 32  # more than anybody sends
MAX_DETAIL: Final = 200
_LISTS: Final = (list, tuple)  # made once: a union in the line is made for every message


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
            head = {"session": message.session, "attempt": message.attempt, "hop": hop_out(message.hop)}
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
    return {
        "plan": step.plan.packed,
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


def _trail_out(trail: tuple[Trace, ...]) -> list[list[float]]:
    return [[t.compute_ms, t.hold_ms, t.filled, t.windows] for t in trail]


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
    raw = head.get("plan")
    if not isinstance(raw, bytes):
        raise BadFrame("plan: not bytes")
    n, start = integer_untrusted(head, "n", 0, MAX_ROWS), integer_untrusted(head, "start", 0, MAX_POSITION)
    history = integer_untrusted(head, "history", 0, MAX_POSITION)
    if 4 * history > len(body):
        raise BadFrame("history: longer than the body")
    split = len(body) - 4 * history
    return Step(
        plan=plan_untrusted(raw),
        seq=integer_untrusted(head, "seq", 0, MAX_COUNT),
        start=start,
        n=n,
        emit=integer_untrusted(head, "emit", 0, min(n, MAX_CHOICES)),
        remaining_ms=integer_untrusted(head, "remaining_ms", 0, 1 << 32),
        reserve_tokens=integer_untrusted(head, "reserve", 0, MAX_POSITION),
        history=struct.unpack(f"<{history}i", body[split:]),
        trail=_trail(head),
        rows=body[:split],
        guess=_ids(head, "guess", min(n, MAX_GUESS)),
        recent=_ids(head, "recent", min(start, MAX_GUESS)),
    )


def _fill(head: Mapping[str, Any], body: bytes) -> Fill:
    return Fill(
        session=session_untrusted(head),
        attempt=integer_untrusted(head, "attempt", 0, MAX_COUNT),
        seq=integer_untrusted(head, "seq", 0, MAX_COUNT),
        layers=layers_untrusted(head),
        start=integer_untrusted(head, "start", 0, MAX_POSITION),
        n=integer_untrusted(head, "n", 1, MAX_ROWS),
        rows=body,
    )


def _need(head: Mapping[str, Any], _body: bytes) -> Need:
    have = integer_untrusted(head, "have", 0, MAX_POSITION)
    return Need(
        session=session_untrusted(head),
        attempt=integer_untrusted(head, "attempt", 0, MAX_COUNT),
        seq=integer_untrusted(head, "seq", 0, MAX_COUNT),
        layers=layers_untrusted(head),
        origin=origin_untrusted(head),
        have=have,
        upto=integer_untrusted(head, "upto", have + 1, MAX_POSITION),
    )


def _reply(head: Mapping[str, Any], _body: bytes) -> Reply:
    return Reply(
        session=session_untrusted(head),
        attempt=integer_untrusted(head, "attempt", 0, MAX_COUNT),
        seq=integer_untrusted(head, "seq", 0, MAX_COUNT),
        end=integer_untrusted(head, "end", 0, MAX_POSITION),
        choices=tuple(_choice(item) for item in list_untrusted(head, "choices", MAX_CHOICES)),
        trail=_trail(head),
        prepared=head.get("prepared") is True,
        guess=_ids(head, "guess", MAX_GUESS),
    )


def _lost(head: Mapping[str, Any], _body: bytes) -> Lost:
    return Lost(
        session=session_untrusted(head),
        attempt=integer_untrusted(head, "attempt", 0, MAX_COUNT),
        node=node_untrusted(head.get("node"), "node"),
        layers=layers_untrusted(head),
        why=word_untrusted(Why, head, "why"),
        detail=text_untrusted(head, "detail", MAX_DETAIL),
    )


def _ask(head: Mapping[str, Any], _body: bytes) -> Ask:
    return Ask(
        session_untrusted(head),
        integer_untrusted(head, "attempt", 0, MAX_COUNT),
        integer_untrusted(head, "seq", 0, MAX_COUNT),
    )


def _progress(head: Mapping[str, Any], _body: bytes) -> Progress:
    return Progress(
        session=session_untrusted(head),
        attempt=integer_untrusted(head, "attempt", 0, MAX_COUNT),
        seq=integer_untrusted(head, "seq", 0, MAX_COUNT),
        layers=layers_untrusted(head),
        phase=word_untrusted(Phase, head, "phase"),
        have=integer_untrusted(head, "have", 0, MAX_POSITION),
    )


def _open(head: Mapping[str, Any], body: bytes) -> Open:
    if len(body) % 4 or len(body) > 4 * MAX_POSITION:
        raise BadFrame("ids: half an id, or too many")
    return Open(
        session=session_untrusted(head),
        attempt=integer_untrusted(head, "attempt", 0, MAX_COUNT),
        hop=hop_untrusted(head.get("hop"), "hop"),
        digest=text_untrusted(head, "digest", MAX_DIGEST),
        tenant=text_untrusted(head, "tenant", 128),
        reserve_tokens=integer_untrusted(head, "reserve", 0, MAX_POSITION),
        ids=body,
    )


def _opened(head: Mapping[str, Any], _body: bytes) -> Opened:
    layers = layers_untrusted(head)
    return Opened(
        session_untrusted(head),
        integer_untrusted(head, "attempt", 0, MAX_COUNT),
        layers,
        integer_untrusted(head, "have", 0, MAX_POSITION),
    )


def _end(head: Mapping[str, Any], _body: bytes) -> End:
    return End(session_untrusted(head), integer_untrusted(head, "attempt", 0, MAX_COUNT))


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


def _trail(head: Mapping[str, Any]) -> tuple[Trace, ...]:
    trail = []
    for item in list_untrusted(head, "trail", MAX_HOPS):
        if not isinstance(item, _LISTS) or len(item) < 3:
            raise BadFrame("trail: not traces")
        filled = whole_untrusted(item[2], "trail", 0, MAX_POSITION)
        windows = len(item) > 3 and item[3] is True
        trail.append(Trace(finite_untrusted(item[0], "trail"), finite_untrusted(item[1], "trail"), filled, windows))
    return tuple(trail)


def _ids(head: Mapping[str, Any], name: str, longest: int) -> tuple[int, ...]:
    if name not in head:
        return ()
    return tuple(whole_untrusted(item, name, 0, 1 << 31) for item in list_untrusted(head, name, longest))


def _choice(item: object) -> Choice:
    if not isinstance(item, _LISTS) or len(item) != 6 or not isinstance(item[5], _LISTS):
        raise BadFrame("choices: not a choice")
    if len(item[5]) > MAX_TOP:
        raise BadFrame("choices: too many alternatives")
    top = []
    for pair in item[5]:
        if not isinstance(pair, _LISTS) or len(pair) != 2:
            raise BadFrame("choices: not an alternative")
        top.append((whole_untrusted(pair[0], "choices", 0, 1 << 31), finite_untrusted(pair[1], "choices")))
    return Choice(
        position=whole_untrusted(item[0], "choices", 0, MAX_POSITION),
        token=whole_untrusted(item[1], "choices", 0, 1 << 31),
        argmax=whole_untrusted(item[2], "choices", 0, 1 << 31),
        logit=finite_untrusted(item[3], "choices"),
        logprob=None if item[4] is None else finite_untrusted(item[4], "choices"),
        top=tuple(top),
    )
