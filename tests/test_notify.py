"""The service manager's protocol, against a socket that listens as systemd does."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from meshd.node.notify import Notifier


def listening(path: str) -> socket.socket:
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(path)
    heard.setblocking(False)
    return heard


def received(heard: socket.socket) -> list[str]:
    lines: list[str] = []
    while True:
        try:
            lines += heard.recv(4096).decode().split("\n")
        except BlockingIOError:
            return lines


def test_ready_status_and_the_watchdog(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with listening(path) as heard, Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000000"}) as notifier:

        async def hour() -> None:
            with trio.move_on_after(24):
                await notifier.run(lambda: "ready\nREADY=0 on one line")

        notifier.send(READY=1)
        trio.run(hour, clock=trio.testing.MockClock(autojump_threshold=0))
        lines = received(heard)
    assert lines[:2] == ["READY=1", "STATUS=ready READY=0 on one line"]
    assert lines.count("WATCHDOG=1") == 5  # every 5 s, so never later than half of the 30 s
    assert len(lines) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_an_abstract_socket() -> None:
    name = f"meshd-notify-{os.getpid()}"
    with listening(f"\0{name}") as heard, Notifier({"NOTIFY_SOCKET": f"@{name}"}) as notifier:
        notifier.send(STOPPING=1)
        assert received(heard) == ["STOPPING=1"]


@pytest.mark.parametrize("where", ["", "vsock:2:1", "/nowhere/at/all"])
def test_without_a_manager_nothing_fails_or_waits(where: str) -> None:
    with Notifier({"NOTIFY_SOCKET": where, "WATCHDOG_USEC": "1"}) as notifier:
        notifier.send(READY=1)


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
    ],
)
def test_whose_watchdog_it_is(environ: dict[str, str], watchdog_s: float | None) -> None:
    with Notifier(environ) as notifier:
        assert notifier.watchdog_s == watchdog_s
