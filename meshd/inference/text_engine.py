"""The daemon's side of the text worker: `Text` for a model's folder.

Owns one child at a time and its restarts. Calls go one after the other (each takes well under a millisecond, or is a long
prompt), all texts that wait to be decoded as one. Calls are shielded while they run, so a caller that leaves never leaves half a
message; every one has a deadline, after which the child is killed and the next call gets a new one. A template that runs for ever
therefore costs one request.

Errors: CallerError from the template or for a call that took too long in it, EngineFailed when the worker dies, Busy when too
many wait, ModelRefused from `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from meshd.errors import Busy, CallerError, EngineFailed, MeshdError, ModelRefused
from meshd.inference.child import Child
from meshd.inference.text_worker import wire

TEMPLATE_S: Final = 2.0
_START_S: Final = 60.0
_CALL_S: Final = 5.0
_BYTES_PER_S: Final = 200_000  # a slow device's pace: longer texts get more time
_MAX_WAITING: Final = 256
_MODULE: Final = "meshd.inference.text_worker"


class _Slow(Exception):
    """A call took longer than it may."""


@dataclass(slots=True, eq=False)
class _Decode:
    """Ids whose text is wanted; the text or why there is none."""

    ids: list[int]
    text: str | MeshdError | None = None


class TextEngine:
    """`Text` by a child process. Make it with `TextEngine.start`."""

    def __init__(self, nursery: trio.Nursery, folder: Path, log: Callable[[str], None]) -> None:
        self._nursery = nursery
        self._folder = folder
        self._log = log
        self._lock = trio.Lock()
        self._child: Child | None = None
        self._buffer = bytearray()
        self._eos_ids: frozenset[int] = frozenset()
        self._template_hangs = False
        self._closed = False
        self._decodes: list[_Decode] = []  # that wait: whoever has the lock next asks for all of them

    @classmethod
    async def start(cls, nursery: trio.Nursery, folder: Path, *, log: Callable[[str], None]) -> TextEngine:
        """Start the worker and wait until it has read the tokenizer. Raises ModelRefused, EngineFailed."""
        engine = cls(nursery, folder, log)
        async with engine._lock:
            await engine._spawn()
        return engine

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def pid(self) -> int | None:
        """The worker's process, while there is one."""
        return self._child.pid if self._child is not None else None

    async def encode(self, text: str, *, special: bool = False) -> list[int]:
        answer = await self._call({"op": "encode", "text": text, "special": special}, _CALL_S)
        return list(answer["ids"])

    async def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        request = {"op": "chat", "messages": [dict(message) for message in messages]}
        return list((await self._call(request, TEMPLATE_S))["ids"])

    async def decode(self, ids: Sequence[int]) -> str:
        wanted = _Decode(list(ids))
        if len(self._decodes) >= _MAX_WAITING:
            raise Busy("too many texts wait for the tokenizer")
        self._decodes.append(wanted)
        try:
            async with self._lock:
                if wanted in self._decodes:
                    await self._decode_all()
        finally:
            if wanted in self._decodes:
                self._decodes.remove(wanted)
        if isinstance(wanted.text, MeshdError):
            raise wanted.text
        if wanted.text is None:  # whoever asked for it together with his own came to grief
            raise EngineFailed("the text worker gave no text")
        return wanted.text

    async def aclose(self) -> None:
        """Stop the worker; idempotent."""
        self._closed = True
        child, self._child = self._child, None
        if child is not None:
            await child.aclose()

    async def _decode_all(self) -> None:
        """One call for all answers that have new tokens: they come with one step of the engine, so they come together."""
        wanted, self._decodes = self._decodes, []
        request = {"op": "decode", "lists": [each.ids for each in wanted]}
        texts: list[Any]
        try:
            texts = list((await self._locked_call(request, wire.pack(request), _CALL_S)).get("texts", ()))
            if len(texts) != len(wanted):
                raise EngineFailed("the text worker gave an answer of another length")
        except MeshdError as error:
            texts = [error] * len(wanted)
        for each, text in zip(wanted, texts, strict=True):
            each.text = text if isinstance(text, str | MeshdError) else EngineFailed(text["message"])

    async def _call(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            data = wire.pack(request)
        except (ValueError, TypeError, OverflowError) as error:
            raise CallerError(f"text that cannot be handed to the tokenizer: {error}") from error
        if self._lock.statistics().tasks_waiting >= _MAX_WAITING:
            raise Busy("too many texts wait for the tokenizer")
        async with self._lock:
            return await self._locked_call(request, data, limit_s)

    async def _locked_call(self, request: Mapping[str, Any], data: bytes, limit_s: float) -> dict[str, Any]:
        limit_s += len(data) / _BYTES_PER_S
        with trio.CancelScope(shield=True):
            try:
                answer = await self._answered(data, limit_s)
            except _Slow:
                raise _too_slow(request["op"], limit_s) from None
        if "code" not in answer:
            return answer
        if answer["code"] == CallerError.code:
            raise CallerError(answer["message"], param=answer.get("param"))
        raise EngineFailed(answer["message"])

    async def _answered(self, data: bytes, limit_s: float) -> dict[str, Any]:
        """The answer, from a new child where the old one has died meanwhile: every call may be made twice."""
        for last in (False, True):
            if self._closed:
                raise EngineFailed("the text worker has been stopped")
            if self._child is None or self._child.gone.is_set():
                await self._spawn()
            try:
                return await self._exchange(data, limit_s)
            except EOFError as end:
                if last:
                    raise EngineFailed(f"the text worker died: {end}") from None
        raise AssertionError("unreachable")

    async def _spawn(self) -> None:
        await self._spawn_one()
        if not self._template_hangs:
            try:
                found = await self._exchange(wire.pack({"op": "turn_end"}), TEMPLATE_S)
            except _Slow:
                # A template that does not even finish two lines: the tokenizer is still good for raw text.
                self._template_hangs = True
                await self._spawn_one()
            except EOFError as end:
                raise EngineFailed(f"the text worker did not start: {end}") from None
            else:
                self._eos_ids = frozenset(found.get("eos_ids", self._eos_ids))

    async def _spawn_one(self) -> None:
        try:
            self._child = await Child.start(self._nursery, _MODULE, [str(self._folder)], log=self._log)
        except OSError as error:  # no descriptor or no memory is left: the next call may find some
            raise EngineFailed(f"the text worker did not start: {error}") from error
        self._buffer.clear()
        try:
            hello = await self._exchange(b"", _START_S)
        except _Slow:
            raise EngineFailed(f"the text worker did not start in {_START_S:.0f} s") from None
        except EOFError as end:
            raise EngineFailed(f"the text worker did not start: {end}") from None
        if "code" in hello:
            raise ModelRefused(hello["message"])
        self._eos_ids |= frozenset(hello["eos_ids"])

    async def _exchange(self, data: bytes, limit_s: float) -> dict[str, Any]:
        """Raises _Slow (and kills the child) or EOFError with the child's last words."""
        child = self._child
        assert child is not None  # noqa: S101  # the callers start one
        try:
            with trio.fail_after(limit_s):
                if data:
                    await child.stream.send_all(data)
                size = wire.length(await self._receive(child, wire.LENGTH.size))
                return wire.unpack(await self._receive(child, size))
        except trio.TooSlowError:
            child.kill()
            await child.gone.wait()
            raise _Slow from None
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, EOFError, ValueError) as error:
            child.kill()
            await child.gone.wait()
            raise EOFError(child.reason or str(error)) from None

    async def _receive(self, child: Child, size: int) -> bytes:
        while len(self._buffer) < size:
            data = await child.stream.receive_some(256 << 10)
            if not data:
                raise EOFError
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def _too_slow(op: str, limit_s: float) -> MeshdError:
    """A template is the model's program run on the caller's messages; the rest is ours."""
    if op == "chat":
        return CallerError(
            f"the model's chat template did not finish these messages in {limit_s:.1f} s", param="messages"
        )
    return EngineFailed(f"the text worker did not {op} in {limit_s:.1f} s")
