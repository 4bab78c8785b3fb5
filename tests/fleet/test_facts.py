"""What a machine's interfaces tell of it, where they tell anything."""

from __future__ import annotations

import errno
import fcntl
import os
import socket

import pytest

from meshd.fleet.device import facts

REAL = {b"eth0": "dca632010203", b"wlan0": "9a1b2c3d4e5f", b"docker0": "0242ac110001", b"lo": "000000000000"}


def test_only_what_a_maker_gave_tells_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def ioctl(_socket: object, _number: int, asked: bytes) -> bytes:
        name = asked.rstrip(b"\0")
        if name not in REAL:
            raise OSError(errno.EADDRNOTAVAIL, "none")
        return asked[:18] + bytes.fromhex(REAL[name]) + asked[24:]

    names = [*(name.decode() for name in REAL), "tun0"]
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert facts._macs() == ["dc:a6:32:01:02:03"]


def test_a_phone_that_tells_nobody_can_be_equipped_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[tuple[int, str]]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "if_nameindex", refuse)
    assert facts._macs() == []
