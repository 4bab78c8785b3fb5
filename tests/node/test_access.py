"""Under which names a node answers: its label's, its address's, and what the network calls the device."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from meshd.config import load
from meshd.node.access import guards_of


def test_the_devices_own_name_is_good_whatever_its_label(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Shelf.example.org")
    config = load(["--name", "n1", "--advertise", "shelf.lan:8091", "--state-dir", str(tmp_path)], {})
    names = guards_of(config, None).names
    assert {"n1", "n1.local", "shelf", "shelf.local", "shelf.example.org", "shelf.lan"} <= names
    assert "example.org" not in names
