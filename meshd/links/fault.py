"""Errors on the wire: a peer's failure is raised here as the same class.

Pure. An error travels as its public code, its message and the few values that its class carries. An unknown code, or values
that do not fit, become PeerError with the peer's words. So do the errors that speak of a link itself (link lost, wrong peer,
bad bytes): told by a peer they are about *its* links, and raised here as they are they would mean this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from meshd.errors import (
    BadDatagram,
    BadFrame,
    Busy,
    LinkLost,
    MeshdError,
    NeedRows,
    PeerError,
    RangeNotHeld,
    StageUnavailable,
    StreamCancelled,
    WrongPeer,
)
from meshd.links.frame import MAX_ARRAY, Err
from meshd.vocabulary import LayerRange


def to_err(stream: int, error: BaseException) -> Err:
    """The ERR frame for ``error``. What is not one of ours travels by its class name: its text may hold a prompt."""
    if not isinstance(error, MeshdError):
        return Err(stream, MeshdError.code, f"internal error ({type(error).__name__})")
    return Err(stream, error.code, error.message, _detail(error))


def from_err(err: Err) -> MeshdError:
    """The error that ``err`` stands for. Never raises."""
    known = _BY_CODE.get(err.code)
    if (
        known is None
        or known is MeshdError
        or issubclass(known, (LinkLost, StreamCancelled, WrongPeer, BadFrame, BadDatagram))
    ):
        return PeerError(err.message)
    rebuild = _REBUILD.get(known)
    try:
        return rebuild(err.message, err.detail) if rebuild else known(err.message, param=_param(err.detail))
    except (KeyError, TypeError, ValueError):
        return PeerError(err.message)


def _detail(error: MeshdError) -> dict[str, Any]:
    match error:
        case NeedRows():
            return {"have": error.have}
        case RangeNotHeld() if error.held is not None:
            return {"held": error.held.json()}
        case Busy():
            return {"retry_after_s": error.retry_after_s}
        case StageUnavailable():
            return {
                "missing": [layers.json() for layers in error.missing[:MAX_ARRAY]],
                "pending": error.pending,
                "retry_after_s": error.retry_after_s,
            }
        case _:
            return {"param": error.param} if error.param is not None else {}


def _param(detail: Mapping[str, Any]) -> str | None:
    param = detail.get("param")
    return param if isinstance(param, str) else None


def _need_rows(_message: str, detail: Mapping[str, Any]) -> MeshdError:
    have = detail["have"]
    if type(have) is not int or have < 0:
        raise ValueError(have)
    return NeedRows(have)


def _range_not_held(message: str, detail: Mapping[str, Any]) -> MeshdError:
    held = detail.get("held")
    return RangeNotHeld(message, held=None if held is None else _layers(held))


def _busy(message: str, detail: Mapping[str, Any]) -> MeshdError:
    return Busy(message, retry_after_s=_retry_after_s(detail))


def _stage_unavailable(message: str, detail: Mapping[str, Any]) -> MeshdError:
    error = StageUnavailable(
        [_layers(pair) for pair in detail["missing"]],
        pending=detail["pending"] is True,
        retry_after_s=_retry_after_s(detail),
    )
    error.message = message
    error.args = (message,)
    return error


def _layers(pair: Any) -> LayerRange:
    start, end = pair
    if type(start) is not int or type(end) is not int:
        raise TypeError(pair)
    return LayerRange(start, end)


def _retry_after_s(detail: Mapping[str, Any]) -> float:
    return min(max(float(detail["retry_after_s"]), 0.0), 60.0)


def _tree(root: type[MeshdError]) -> Iterator[type[MeshdError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


# Only the shared tree travels: a package's own leaves would depend on what happens to be imported.
_BY_CODE: Final = {cls.code: cls for cls in _tree(MeshdError) if cls.__module__ == MeshdError.__module__}
_REBUILD: Final[Mapping[type[MeshdError], Callable[[str, Mapping[str, Any]], MeshdError]]] = {
    NeedRows: _need_rows,
    RangeNotHeld: _range_not_held,
    Busy: _busy,
    StageUnavailable: _stage_unavailable,
}
