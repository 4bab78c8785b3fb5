"""The error tree. Each leaf says whose fault it is and which HTTP status it becomes.

Raise the leaf with a message that names the offending thing and, where there is one, what to do about it. Errors travel
between nodes as (code, message), see `from_wire`: a peer's failure is raised here as the same class.
"""

from __future__ import annotations

from typing import Any, ClassVar

from meshd.vocabulary import LayerRange


class MeshdError(Exception):
    """Base of everything meshd raises on purpose. ``code`` is stable and public; ``status`` is the HTTP status."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def json(self) -> dict[str, Any]:
        """The ``error`` object of the HTTP interface."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}


# --- the caller's fault -----------------------------------------------------------------------------------------------


class CallerError(MeshdError):
    """The request cannot be right, whoever receives it."""

    code = "invalid_request"
    status = 400
    kind = "invalid_request_error"


class UnsupportedParameter(CallerError):
    """A parameter that would change the answer and is not supported."""

    code = "unsupported_parameter"


class ContextLengthExceeded(CallerError):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"


class BadTensor(CallerError):
    """A body of the tensor wire that is not what its header says."""

    code = "bad_tensor"


class Unauthorized(CallerError):
    """No key, or a wrong one."""

    code = "unauthorized"
    status = 401
    kind = "authentication_error"


class Forbidden(CallerError):
    """A foreign Host or Origin, or a key without the right."""

    code = "forbidden"
    status = 403
    kind = "permission_error"


class NotFound(CallerError):
    """No such path or model."""

    code = "not_found"
    status = 404
    kind = "not_found_error"


class ModelNotFound(NotFound):
    """A model that this room does not serve."""

    code = "model_not_found"


class MethodNotAllowed(CallerError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    status = 405


class RequestTimeout(CallerError):
    """The client did not finish sending its request in time."""

    code = "request_timeout"
    status = 408


class Conflict(CallerError):
    """The request disagrees with what this node holds."""

    code = "conflict"
    status = 409
    kind = "conflict_error"


class BadRoute(Conflict):
    """A pinned route that cannot be walked."""

    code = "bad_route"


class ModelChanged(Conflict):
    """A resume against another digest than the stream began with."""

    code = "model_changed"


class RangeNotHeld(Conflict):
    """This node does not hold the layers asked for."""

    code = "range_not_held"

    def __init__(self, message: str, *, held: LayerRange | None = None, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.held = held

    def json(self) -> dict[str, Any]:
        return {**super().json(), "layers": self.held.json() if self.held else None}


class PayloadTooLarge(CallerError):
    """A body or header above its limit."""

    code = "payload_too_large"
    status = 413


# --- the room's state -------------------------------------------------------------------------------------------------


class Busy(MeshdError):
    """Every place is taken; try again in ``retry_after_s``."""

    code = "busy"
    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StageUnavailable(MeshdError):
    """Layers that no live, admitted replica holds."""

    code = "stage_unavailable"
    status = 503
    kind = "unavailable_error"

    def __init__(
        self, missing: list[LayerRange], *, pending: bool = False, why: str = "", retry_after_s: float = 1.0
    ) -> None:
        stages = ", ".join(str(layers) for layers in missing) or "of the model"
        super().__init__(f"stage {stages} unavailable: {why or 'no live replica'}")
        self.missing = missing
        self.pending = pending
        self.retry_after_s = retry_after_s

    def json(self) -> dict[str, Any]:
        more: dict[str, Any] = {"missing": [layers.json() for layers in self.missing]}
        if self.pending:
            more["pending"] = True
        return {**super().json(), **more}


class NotReady(MeshdError):
    """This node cannot take requests now (no model yet, draining, failed): another entry can."""

    code = "not_ready"
    status = 503
    kind = "unavailable_error"
    retry_after_s: ClassVar[float] = 1.0


class NoOtherEntry(NotReady):
    """Nobody else of the room can take requests for the model now either."""


class DeadlineExceeded(MeshdError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    status = 504
    kind = "timeout_error"


# --- a peer's fault ---------------------------------------------------------------------------------------------------


class PeerError(MeshdError):
    """Something another node or the engine worker did."""

    code = "peer_error"
    status = 502


class BadFrame(PeerError):
    """Bytes on a link that are not a frame: the link is closed."""

    code = "bad_frame"


class BadDatagram(PeerError):
    """A datagram that is not one of ours: dropped and counted."""

    code = "bad_datagram"


class LinkLost(PeerError):
    """The link to a peer broke or could not be made."""

    code = "link_lost"


class StreamCancelled(PeerError):
    """The peer no longer reads a stream: whatever is computed for it may stop at once."""

    code = "stream_cancelled"


class WrongPeer(PeerError):
    """The other end proved to be somebody else, or is barred."""

    code = "wrong_peer"


class NeedRows(PeerError):
    """A session's state ends before the step starts: rows from ``have`` on are wanted."""

    code = "need_rows"

    def __init__(self, have: int) -> None:
        super().__init__(f"rows from {have} on are missing")
        self.have = have


class EngineFailed(PeerError):
    """The engine worker crashed or refused; its words are in the message."""

    code = "engine_failed"


# --- this device's fault, or its owner's ------------------------------------------------------------------------------


class LocalError(MeshdError):
    """Something on this device: the CLI prints the message and exits 1."""

    code = "local_error"


class UsageError(LocalError):
    """A flag, key or value that cannot be: the CLI exits 2."""

    code = "usage_error"


class StateError(LocalError):
    """The state folder cannot be used (locked, unwritable, damaged)."""

    code = "state_error"


class ModelRefused(LocalError):
    """A model that is damaged, unsafe or cannot be cut; names the file and tensor."""

    code = "model_refused"


class StoreFull(LocalError):
    """The disk has no room for a model."""

    code = "store_full"


class DoesNotFit(LocalError):
    """A range above this node's memory; says by how many MB."""

    code = "does_not_fit"
