"""A child process of the daemon, joined to it by a socketpair: started by exec, watched, ended with a deadline.

Owns processes and their last words; knows nothing of what is said over the socket. The child gets its end of the pair as an
inherited descriptor, named by its first argument, and is expected to end when the socket does.

Invariants: the child is always reaped; its stderr is always drained, line by line, to ``log`` (a pipe that nobody reads would
stop it). `gone` is set when it has ended and `reason` then says why, in its own last words where it had any.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import trio

KILL_AFTER_S = 3.0
_KEPT_LINES = 20
_MAX_LINE = 1000


class Child:
    """One running child. Make it with `Child.start`."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream, log: Callable[[str], None]) -> None:
        self.stream = stream
        self.gone = trio.Event()
        self._process = process
        self._log = log
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)

    @classmethod
    async def start(
        cls,
        nursery: trio.Nursery,
        module: str,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        log: Callable[[str], None],
    ) -> Child:
        """Run ``python -m module FD arguments...``; its supervisor lives in ``nursery``. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await trio.lowlevel.open_process(
                    # -P: the folder a daemon happens to be started in is no place to import from.
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **(environment or {})},
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        child = cls(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)), log)
        nursery.start_soon(child._supervise)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def reason(self) -> str:
        """Why it ended; empty while it runs."""
        code = self._process.returncode
        if code is None:
            return ""
        if code < 0:
            name = signal.strsignal(-code) or f"signal {-code}"
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            said = f": {self._last[-1]}" if self._last else ""
            return f"ended by a signal: {name}{hint}{said}"
        return self._last[-1] if self._last else f"ended with status {code}"

    def kill(self) -> None:
        """End it now. Never waits."""
        if self._process.returncode is None:
            self._process.kill()

    async def aclose(self, deadline_s: float = KILL_AFTER_S) -> None:
        """Close the socket, wait, then kill. Idempotent; also when cancelled nothing is left behind."""
        try:
            await trio.aclose_forcefully(self.stream)
            with trio.move_on_after(deadline_s):
                await self.gone.wait()
        finally:
            self.kill()
        await self.gone.wait()

    async def _supervise(self) -> None:
        try:
            await self._drain()
            await self._process.wait()
        finally:
            # Also when the daemon is ending: its child must not outlive it, and a zombie must not outlive the child.
            with trio.CancelScope(shield=True):
                self.kill()
                await self._process.wait()
                self.gone.set()
                await trio.aclose_forcefully(self.stream)

    async def _drain(self) -> None:
        assert self._process.stderr is not None  # noqa: S101  # asked for in start
        rest = b""
        async for data in self._process.stderr:
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-_MAX_LINE:]
            for line in lines:
                self._say(line)
        self._say(rest)

    def _say(self, line: bytes) -> None:
        text = line[:_MAX_LINE].decode("utf-8", "replace").rstrip()
        if text:
            self._last.append(text)
            self._log(text)
