"""Asks a device over OpenSSH. One connection per device is kept open for the run and shared by its questions.

BatchMode: ssh never asks for anything; what it would have asked for is an error that says so. A device's host key is taken on
first sight and insisted on afterwards. Raises DeviceFailed.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from meshd.errors import LocalError
from meshd.fleet import agent
from meshd.fleet.hosts import Device

CONNECT_S = 15


class DeviceFailed(Exception):
    """A device that cannot be asked or cannot do what it was asked; the message is for the report."""


class Asker(Protocol):
    """How the work asks a device: over SSH, or of a fake in tests."""

    def ask(self, do: str, *, payload: Path | None = None, timeout_s: float = 300, **request: Any) -> dict[str, Any]:
        """Raises DeviceFailed."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """``jump``: ssh's -J; ``identity``: -i; ``python``: the interpreter there."""

    jump: str | None = None
    identity: Path | None = None
    python: str | None = None


class SshSession:
    """The control sockets of one run. Use as a context manager."""

    def __init__(self, options: Options) -> None:
        if shutil.which("ssh") is None:
            raise LocalError("there is no ssh here; install OpenSSH's client")
        self.options = options
        # The socket's path must stay under 104 characters on some systems, so not under a long TMPDIR.
        self._folder = Path(tempfile.mkdtemp(prefix="meshd-", dir="/tmp" if Path("/tmp").is_dir() else None))  # noqa: S108
        self._opened: list[Device] = []

    def __enter__(self) -> SshSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for device in self._opened:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                words = [*self.words(device)[:-1], "-O", "exit", self.words(device)[-1]]
                subprocess.run(words, capture_output=True, timeout=5, check=False)  # noqa: S603 - ssh's own words
        shutil.rmtree(self._folder, ignore_errors=True)

    def asker(self, device: Device) -> SshAsker:
        self._opened.append(device)
        return SshAsker(self, device)

    def words(self, device: Device) -> list[str]:
        """ssh and its options; the destination comes last."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_S),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "4",
            "StrictHostKeyChecking": "accept-new",
            "ControlMaster": "auto",
            "ControlPersist": "60",
            "ControlPath": str(self._folder / "%C"),
        }
        words = ["ssh", "-T", *(f"-o{key}={value}" for key, value in options.items())]
        if self.options.jump:
            words += ["-J", self.options.jump]
        if self.options.identity:
            words += ["-i", str(self.options.identity), "-oIdentitiesOnly=yes"]
        if device.port:
            words += ["-p", str(device.port)]
        return [*words, f"{device.user}@{device.host}" if device.user else device.host]


class SshAsker:
    """One device."""

    def __init__(self, session: SshSession, device: Device) -> None:
        self._words = [*session.words(device), agent.remote_command(session.options.python)]

    def ask(self, do: str, *, payload: Path | None = None, timeout_s: float = 300, **request: Any) -> dict[str, Any]:
        """Send a request and whatever it carries; the answer. Raises DeviceFailed."""
        with tempfile.TemporaryFile() as said:
            ended, output = self._run(agent.message({"do": do, **request}), payload, said, timeout_s)
            said.seek(0)
            complaint = said.read().decode("utf-8", "replace").strip()
        answer = agent.answer_in(output)
        if answer is None:
            reason = complaint.splitlines()[-1] if complaint else f"ssh ended with status {ended} and no answer"
            raise DeviceFailed(_explained(reason) if ended == 255 else f"{do}: {reason}")
        if "trouble" in answer:
            raise DeviceFailed(str(answer["trouble"]))
        return answer

    def _run(self, message: bytes, payload: Path | None, said: BinaryIO, timeout_s: float) -> tuple[int, str]:
        """Exit status and stdout. stderr goes to a file: nobody would read a pipe while the payload is written."""
        with subprocess.Popen(  # noqa: S603 - ssh's own words
            self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        ) as process:
            timer = threading.Timer(timeout_s, process.kill)
            timer.start()
            try:
                if process.stdin is None or process.stdout is None:
                    raise DeviceFailed("ssh has no pipes")
                with contextlib.suppress(BrokenPipeError):  # it ended early: its answer or complaint says why
                    process.stdin.write(message)
                    if payload is not None:
                        with payload.open("rb") as file:
                            shutil.copyfileobj(file, process.stdin, 1 << 18)
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                output = process.stdout.read().decode("utf-8", "replace")
                return process.wait(), output
            finally:
                timer.cancel()


def _explained(reason: str) -> str:
    """ssh's last line, and what to do where it is not obvious."""
    if "Permission denied" in reason:
        return f"{reason.strip()} (mass-equip never asks for a password: copy a key there with ssh-copy-id, or name one with -i)"
    if "REMOTE HOST IDENTIFICATION" in reason or "Host key verification failed" in reason:
        return f"{reason.strip()} (reinstalled? forget the old key with ssh-keygen -R)"
    return reason.strip()
