"""A client of the simulated room: asks an entry, goes on at another one, and compares every token.

Owns what a client knows: the ids it has, and whether its entry still answers. Speaks `POST /chain` as a streaming client does,
without the HTTP around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from meshd.api.message import Headers, Request, error_response, leaf_error
from meshd.daemon import Daemon
from meshd.errors import MeshdError
from meshd.inference.engine import Sampling
from meshd.inference.hash_stage import reference
from tests.sim.whole.node import Device

HONEST: Final = {"stage_unavailable", "not_ready", "busy", "deadline_exceeded", "model_changed"}
SILENCE_S: Final = 5.0  # then a client leaves an entry that hangs
OVERTIME_S: Final = 3.0  # past the deadline that it gave
LOOK_S: Final = 0.5


@dataclass
class Wish:
    """What a client wants, and what it has got of it."""

    number: int
    prompt: str
    max_tokens: int
    layers: int
    deadline_s: float
    temperature: float = 0.0
    stateless: bool = False
    got: list[int] = field(default_factory=list)
    final: Mapping[str, Any] | None = None
    want: list[int] = field(init=False)

    def __post_init__(self) -> None:
        sampling = Sampling(temperature=self.temperature, seed=self.number)
        self.want = reference(tuple(self.prompt.encode()), self.max_tokens, self.layers, sampling=sampling)

    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "stream": True,
            "seed": self.number,
            "temperature": self.temperature,
            "kv": "stateless" if self.stateless else "sticky",
            "deadline_ms": int(self.deadline_s * 1000),
            **({"resume": {"tokens": self.got}} if self.got else {}),
        }


def _request(path: str, body: object, request_id: str) -> Request:
    return Request(
        "POST",
        path,
        headers={"host": "127.0.0.1", "content-type": "application/json"},
        body=json.dumps(body).encode(),
        client="127.0.0.1",
        request_id=request_id,
    )


@dataclass
class Attempt:
    """One entry's try at it. ``error`` is the code it ended with; empty if it did not end by the entry's word."""

    wish: Wish
    entry: Device
    began: float
    heard_at: float
    error: str = ""
    message: str = ""
    ended: bool = False
    wrong: str = ""
    route: list[Mapping[str, Any]] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)

    async def run(self) -> None:
        """Until the entry has answered or is gone, or is silent and hangs."""
        over = trio.Event()

        async def there() -> None:
            await self.entry.run_in(self._ask)
            over.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(there)
            while not over.is_set() and not self._in_vain():
                with trio.move_on_after(LOOK_S):
                    await over.wait()
            self.left = True
            if self._scope is not None:
                self._scope.cancel()
            nursery.cancel_scope.cancel()

    def _in_vain(self) -> bool:
        now = trio.current_time()
        hangs = not self.entry.well and now > self.heard_at + SILENCE_S
        return hangs or now > self.began + self.wish.deadline_s + OVERTIME_S

    left = False
    _scope: trio.CancelScope | None = None

    async def _ask(self, daemon: Daemon) -> None:
        """In the entry's process."""
        if self.left:
            return
        with trio.CancelScope() as self._scope:
            request = _request("/chain", self.wish.body(), f"wish-{self.wish.number}")
            try:
                response = await daemon.app.plan(request, None).answer(request, self)
            except Exception as error:  # noqa: BLE001 - as the connection that carries it does
                known = leaf_error(error)
                if known is None:
                    self.wrong = f"internal error {error!r}"
                response = error_response(known or MeshdError("internal error"))
            if response is not None:
                self._take(json.loads(response.body))
            self.ended = True

    # --- the entry's writer -------------------------------------------------------------------------------------------

    started = False

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        for line in data.decode().splitlines():
            if line.startswith("data:"):
                self._take(json.loads(line[5:]))

    def _take(self, event: Mapping[str, Any]) -> None:
        if self.left:
            return
        self.heard_at = trio.current_time()
        if "error" in event:
            self.error, self.message = event["error"]["code"], event["error"]["message"]
            self.missing = [(start, end) for start, end in event["error"].get("missing", ())]
        elif "finish_reason" in event:
            self.wish.final = event
        elif "tokens" in event:
            self.wish.got += event["tokens"]
            self._compare()
        else:
            self.route = event["route"]

    def _compare(self) -> None:
        if self.wish.got != self.wish.want[: len(self.wish.got)] and not self.wrong:
            self.wrong = f"got {self.wish.got}, wanted {self.wish.want}"


class _Whole:
    """A writer for answers that come whole."""

    started = False

    async def start(self, status: int, headers: Headers) -> None:
        raise NotImplementedError

    async def send(self, data: bytes) -> None:
        raise NotImplementedError


async def administer(device: Device, what: str) -> None:
    """``POST /admin/<what>`` on the device itself."""

    async def post(daemon: Daemon) -> None:
        request = _request(f"/admin/{what}", {}, what)
        await daemon.app.plan(request, None).answer(request, _Whole())

    await device.run_in(post)
