"""The machine under simulated nodes: what a run may know of the outside is its seed.

Owns the replacing of every door through which a daemon reaches its machine (`sealed`): randomness, threads, sockets, sensors; and
the process of each node: `NODE` says whose a task is, and a frozen node's tasks stay where they are while the clock goes on, as
after SIGSTOP. Uses trio's deterministic scheduling, which hypothesis uses too, and replaces its run queue.

Sets of text are ordered by the interpreter's hash seed: a run repeats in another process only under ``PYTHONHASHSEED=0``.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final
from unittest import mock

import trio
import trio.testing
from trio._core import _run as scheduler

from meshd.vocabulary import Health

NODE: Final[ContextVar[str]] = ContextVar("NODE", default="")
"""The name of the node that a task is part of; empty for the world's own."""


def clock() -> trio.testing.MockClock:
    """Time that passes only while everybody waits. Its class is final and asks for statistics at each jump: these do not."""
    made = trio.testing.MockClock(rate=0.0, autojump_threshold=0.0)

    def jump() -> None:
        due = scheduler.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if due < math.inf:
            made._virtual_base = max(made._virtual_base, due)  # exactly: a sum of differences would drift

    made.current_time = lambda: made._virtual_base  # type: ignore[method-assign]
    made._autojump = jump  # type: ignore[method-assign]
    return made


class Processes(deque[Any]):
    """Trio's run queue, with the tasks of frozen nodes kept aside."""

    def __init__(self) -> None:
        super().__init__()
        self._aside: dict[str, list[Any]] = {}

    def install(self) -> None:
        """Into the running loop."""
        runner = scheduler.GLOBAL_RUN_CONTEXT.runner
        self.extend(runner.runq)
        runner.runq = self

    def append(self, task: Any) -> None:
        aside = self._aside.get(task.context.get(NODE, "")) if self._aside else None
        if aside is None:
            super().append(task)
        else:
            aside.append(task)

    def freeze(self, node: str) -> None:
        """SIGSTOP: what is runnable waits, and what becomes runnable too."""
        self._aside.setdefault(node, [])
        tasks = list(self)
        self.clear()
        for task in tasks:
            self.append(task)

    def thaw(self, node: str) -> None:
        """SIGCONT."""
        self.extend(self._aside.pop(node, ()))

    def frozen(self, node: str) -> bool:
        return node in self._aside


class Dice:
    """All randomness of a run, in streams that do not disturb each other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def stream(self, name: str) -> random.Random:
        return _Random(f"{self._seed} {name}")


_Random: Final = random.Random


async def _inline(sync_fn: Callable[..., Any], *args: Any, **_options: Any) -> Any:
    """A thread that is done before anybody else runs."""
    await trio.lowlevel.checkpoint()
    return sync_fn(*args)


def _health() -> Health:
    return Health(ram_free_mb=4000, ram_total_mb=8000, load1=0.1)


@contextlib.contextmanager
def sealed(
    seed: int,
    *,
    connect: Callable[..., Awaitable[Any]],
    readable: Callable[[Any], Awaitable[None]],
    told_to_stop: Callable[[], Awaitable[None]],
) -> Iterator[None]:
    """While inside, nothing but ``seed`` decides what daemons meet. No garbage collection: it would run finalizers when it
    pleases."""
    drawn = _Random(f"{seed} drawn")

    class Drawn(_Random):  # type: ignore[valid-type, misc]  # the class as it was before it was replaced
        def __init__(self, given: object = None) -> None:
            super().__init__(drawn.getrandbits(64) if given is None else given)

    def urandom(size: int) -> bytes:
        return drawn.randbytes(size)

    scheduler._r.seed(seed)
    gc.collect()
    gc.disable()
    try:
        with (
            mock.patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
            mock.patch.object(random, "Random", Drawn),
            mock.patch.object(random, "SystemRandom", Drawn),
            mock.patch.object(os, "urandom", urandom),
            mock.patch.object(trio.to_thread, "run_sync", _inline),
            mock.patch.object(trio, "open_tcp_stream", connect),
            mock.patch.object(trio.lowlevel, "wait_readable", readable),
            mock.patch("meshd.gossip.health_sampler.sample", _health),
            mock.patch("meshd.gossip.addresses.interfaces", list),
            mock.patch("meshd.gossip.node._suspended_s", float),
            mock.patch("meshd.daemon.interfaces", list),
            mock.patch("meshd.daemon._stop_signals", return_value=contextlib.nullcontext(told_to_stop)),
        ):
            yield
    finally:
        gc.enable()
