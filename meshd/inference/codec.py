"""Engine calls as messages: what goes over the socketpair between a daemon and its worker.

Owns the layout of every kind below; the frames around it are `links/frame.py`. Imported at both ends, so it sees neither
torch nor trio. One stream carries one call: a request message, one reply (or the stream's error), the end. Only a load
answers with any number of PROGRESS before LOADED.

Heads hold what is small and of bounded size; rows, ids, choices and the load's paths travel in the body (heads have caps).
Functions ending in ``_untrusted`` check before they slice and raise only `BadFrame`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from meshd.errors import BadFrame
from meshd.inference.engine import Choice, EngineHealth, Opening, Ran, Run, Sampling
from meshd.links.fields import amount_untrusted, integer_untrusted, layers_untrusted
from meshd.links.wire import Message
from meshd.vocabulary import LayerRange, SessionId

LOAD: Final = "load"
PROGRESS: Final = "progress"
LOADED: Final = "loaded"
RUN: Final = "run"
RAN: Final = "ran"
BOUNDARY: Final = "boundary"
FORWARD: Final = "forward"  # ``embedded`` in its head: rows for layer 0 are residual, not ids
EMBED: Final = "embed"
LM_HEAD: Final = "lm_head"
ROWS: Final = "rows"
DROP: Final = "drop"
OPEN: Final = "open"  # a session's prompt; the answer's head says how much of it the session ``have``s now

_MAX_ROWS: Final = 1 << 22
_CHOICE: Final = struct.Struct("<IIIddH")  # position, token, argmax, logit, logprob (NaN: none), how many alternatives
_TOP: Final = struct.Struct("<Id")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker loads and how far it may go. ``kv_budget_bytes`` covers KV and boundary log of all its sessions,
    ``private_budget_bytes`` copies of weights (None: no limit)."""

    folder: str
    layers: LayerRange
    dtype: str = "auto"
    threads: int = 1
    deterministic: bool = True
    prepack: str = "auto"
    private_budget_bytes: int | None = None
    kv_budget_bytes: int = 256 << 20
    context: int = 0  # 0: not known, no limit
    max_batch: int = 32
    prefill_rows: int = 128
    max_queue: int = 256
    digest: str = ""
    prefix_bytes: int = 0  # of kv_budget_bytes, for the beginnings of prompts
    prefix_ttl_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker found out about what it loaded."""

    dtype: str
    arith: str
    deterministic: bool
    hidden_size: int
    vocab_size: int
    layer_ms_1: float
    layer_ms_64: float
    private_bytes: int
    warnings: tuple[str, ...]


def load_message(config: WorkerConfig) -> Message:
    """The first message to a worker."""
    return Message(LOAD, body=json.dumps({**asdict(config), "layers": config.layers.json()}).encode())


def config_untrusted(message: Message) -> WorkerConfig:
    """Read a LOAD."""
    raw = _json_untrusted(message, LOAD, WorkerConfig)
    try:
        start, end = raw["layers"]
        return WorkerConfig(**{**raw, "layers": LayerRange(start, end)})
    except (KeyError, TypeError, ValueError) as error:
        raise BadFrame(f"not a load: {error}") from error


def loaded_message(loaded: Loaded) -> Message:
    """The answer to a LOAD."""
    return Message(LOADED, body=json.dumps(asdict(loaded)).encode())


def loaded_untrusted(message: Message) -> Loaded:
    """Read a LOADED."""
    raw = _json_untrusted(message, LOADED, Loaded)
    try:
        return Loaded(**{**raw, "warnings": tuple(map(str, raw["warnings"]))})
    except (KeyError, TypeError) as error:
        raise BadFrame(f"not the answer to a load: {error}") from error


def _json_untrusted(message: Message, kind: str, shape: type) -> dict[str, Any]:
    if message.kind != kind:
        raise BadFrame(f"{message.kind} where {kind} was due")
    try:
        raw = json.loads(message.body)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a {kind} whose body is not JSON") from error
    known = {field.name for field in fields(shape)}
    if not isinstance(raw, dict) or not set(raw) <= known:
        raise BadFrame(f"a {kind} with unknown fields")
    return raw


def run_message(run: Run) -> Message:
    """A RUN: rows first, then the history's ids."""
    head: dict[str, Any] = {
        "session": run.session,
        "layers": run.layers.json(),
        "start": run.start,
        "n": run.n,
        "emit": run.emit,
        "prompt_len": run.prompt_len,
        "reserve": run.reserve_tokens,
    }
    if run.sampling is not None:
        head["sampling"] = asdict(run.sampling)
    if not run.history:
        return Message(RUN, head, run.rows)
    head["history"] = len(run.history)
    return Message(RUN, head, run.rows + struct.pack(f"<{len(run.history)}I", *run.history))


def run_untrusted(message: Message) -> Run:
    """Read a RUN; whether its rows fit the model is the engine's to say."""
    head = message.head
    n = integer_untrusted(head, "n", 0, _MAX_ROWS)
    history = integer_untrusted(head, "history", 0, len(message.body) // 4, default=0)
    cut = len(message.body) - 4 * history
    return Run(
        session=session_untrusted(head),
        layers=layers_untrusted(head),
        start=integer_untrusted(head, "start", 0, _MAX_ROWS),
        n=n,
        emit=integer_untrusted(head, "emit", 0, n),
        prompt_len=integer_untrusted(head, "prompt_len", 0, _MAX_ROWS),
        rows=message.body[:cut] if history else message.body,
        reserve_tokens=integer_untrusted(head, "reserve", 0, _MAX_ROWS, default=0),
        sampling=_sampling_untrusted(head.get("sampling")),
        history=struct.unpack(f"<{history}I", message.body[cut:]),
    )


def open_message(opening: Opening) -> Message:
    """An OPEN: the prompt's ids are its body."""
    head = {"session": opening.session, "layers": opening.layers.json(), "tenant": opening.tenant}
    return Message(OPEN, {**head, "reserve": opening.reserve_tokens}, opening.ids)


def opening_untrusted(message: Message) -> Opening:
    """Read an OPEN."""
    head, tenant = message.head, message.head.get("tenant")
    if not isinstance(tenant, str) or len(message.body) % 4 or len(message.body) > 4 * _MAX_ROWS:
        raise BadFrame("an opening without a tenant or with half an id")
    reserve = integer_untrusted(head, "reserve", 0, _MAX_ROWS)
    return Opening(session_untrusted(head), layers_untrusted(head), tenant, message.body, reserve)


_SAMPLING: Final = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "repetition_penalty": (1e-3, 1e3),
}


def _sampling_untrusted(raw: object) -> Sampling | None:
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise BadFrame("sampling is not a map")
    numbers: dict[str, float] = {}
    for name, (low, high) in _SAMPLING.items():
        value = raw.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise BadFrame(f"{name} is not a number from {low} to {high}")
        numbers[name] = float(value)
    return Sampling(
        **numbers,
        top_k=integer_untrusted(raw, "top_k", 0, 1 << 31),
        seed=integer_untrusted(raw, "seed", -(1 << 63), (1 << 64) - 1),
        logprobs=None if raw.get("logprobs") is None else integer_untrusted(raw, "logprobs", 0, 100),
    )


def ran_message(ran: Ran) -> Message:
    """A RAN: choices or rows in the body."""
    head = {"ms": ran.compute_ms, "wait_ms": ran.queue_ms, "batch": ran.batch, "choices": len(ran.choices)}
    return Message(RAN, head, pack_choices(ran.choices) if ran.choices else ran.rows)


def ran_untrusted(message: Message) -> Ran:
    """Read a RAN."""
    if message.kind != RAN:
        raise BadFrame(f"{message.kind} where {RAN} was due")
    count = integer_untrusted(message.head, "choices", 0, len(message.body) // _CHOICE.size)
    return Ran(
        rows=b"" if count else message.body,
        choices=choices_untrusted(message.body, count) if count else (),
        compute_ms=amount_untrusted(message.head, "ms"),
        queue_ms=amount_untrusted(message.head, "wait_ms"),
        batch=integer_untrusted(message.head, "batch", 0, 1 << 20),
    )


def pack_choices(choices: tuple[Choice, ...]) -> bytes:
    """Choices as bytes, exactly: a token drawn here is the same everywhere."""
    parts = []
    for choice in choices:
        logprob = float("nan") if choice.logprob is None else choice.logprob
        parts.append(_CHOICE.pack(choice.position, choice.token, choice.argmax, choice.logit, logprob, len(choice.top)))
        parts += [_TOP.pack(token, value) for token, value in choice.top]
    return b"".join(parts)


def choices_untrusted(body: bytes, count: int) -> tuple[Choice, ...]:
    """Read ``count`` choices that fill ``body``."""
    choices = []
    at = 0
    try:
        for _ in range(count):
            position, token, argmax, logit, logprob, tops = _CHOICE.unpack_from(body, at)
            at += _CHOICE.size
            end = at + tops * _TOP.size
            top = tuple(_TOP.iter_unpack(body[at:end])) if end <= len(body) else None
            if top is None:
                raise BadFrame("choices that end early")
            at = end
            none = logprob != logprob  # noqa: PLR0124  # NaN is the only number that differs from itself
            choices.append(Choice(position, token, argmax, logit, None if none else logprob, top))
    except struct.error as error:
        raise BadFrame("choices that end early") from error
    if at != len(body):
        raise BadFrame(f"{len(body) - at} bytes after the choices")
    return tuple(choices)


def health_untrusted(pong: Mapping[str, Any]) -> EngineHealth:
    """A worker's state as its PONG carries it; anything missing is 0."""

    def whole(name: str) -> int:
        return integer_untrusted(pong, name, 0, 1 << 62, default=0)

    return EngineHealth(
        tick=whole("tick"),
        busy_ms=amount_untrusted(pong, "busy_ms"),
        queue_depth=whole("queue"),
        sessions=whole("sessions"),
        kv_used_bytes=whole("kv_used"),
        kv_total_bytes=whole("kv_total"),
        tokens_per_s=amount_untrusted(pong, "tokens_per_s"),
        counters={
            name: integer_untrusted(pong, name, 0, 1 << 62, default=0)
            for name in ("runs", "rows", "need_rows", "busy", "evicted", "failed")
        },
    )


def session_untrusted(head: Mapping[str, Any]) -> SessionId:
    """The session a message is about."""
    session = head.get("session")
    if not isinstance(session, str) or not 0 < len(session) <= 64:
        raise BadFrame("no session")
    return SessionId(session)
