"""A changed mesh key is used as a whole or, while it cannot be, not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from meshd import daemon as module
from meshd.daemon import Daemon
from meshd.errors import StateError
from meshd.identity import mesh_key
from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.node.key_watch import watch_key


def ring(number: int) -> KeyRing:
    return KeyRing((MeshKey(bytes([number]) * 32),))


class Parts:
    """What a daemon hands a ring to. ``full``: no temporary folder can be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.said: list[str] = []
        self.used: dict[str, Any] = {}
        monkeypatch.setattr(module, "LinkTls", self._tls)
        monkeypatch.setattr(module, "guards_of", lambda _config, new: ("guards", new))
        self.daemon = Daemon.__new__(Daemon)
        vars(self.daemon).update(
            config=None,
            identity=SimpleNamespace(key=None),
            sealer=SimpleNamespace(rekey=lambda new: self.used.update(sealer=new)),
            opener=SimpleNamespace(rekey=lambda new: self.used.update(opener=new)),
            links=SimpleNamespace(security=None),
            app=SimpleNamespace(guards=None),
            log=SimpleNamespace(emit=lambda _name, *, level="info", text: self.said.append(f"{level} {text}")),
        )

    def _tls(self, _key: object, new: KeyRing) -> Any:
        if self.full:
            raise StateError("no temporary folder can be used")
        return ("tls", new)

    def all_use(self, new: KeyRing) -> bool:
        shown: tuple[Any, ...] = (self.daemon.links.security, self.daemon.app.guards, self.daemon.ring)
        return self.used == {"sealer": new, "opener": new} and shown == (("tls", new), ("guards", new), new)


@asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch, path: Path, *, written: int = 1) -> AsyncIterator[Parts]:
    """A daemon that uses ``ring(1)`` and watches its file, which holds ``ring(written)`` as it begins to."""
    async with trio.open_nursery() as nursery:
        parts = Parts(monkeypatch)
        parts.daemon._on_key(ring(1))
        mesh_key.save(path, ring(written))
        nursery.start_soon(watch_key, path, ring(1), parts.daemon._on_key, parts.daemon.log)
        await trio.testing.wait_all_tasks_blocked()
        yield parts
        nursery.cancel_scope.cancel()


def test_a_key_that_cannot_be_used_now_changes_nothing_and_is_used_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with watched(monkeypatch, tmp_path / "key") as parts:
            assert parts.all_use(ring(1))
            parts.full = True
            mesh_key.save(tmp_path / "key", ring(2))
            await trio.sleep(10)
            assert parts.all_use(ring(1))
            assert parts.said == ["warning kept the keys in use for now: no temporary folder can be used"]
            parts.full = False
            await trio.sleep(3)
            assert parts.all_use(ring(2))

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_key_that_waited_does_not_undo_a_newer_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with watched(monkeypatch, tmp_path / "key") as parts:
            parts.full = True
            mesh_key.save(tmp_path / "key", ring(2))
            await trio.sleep(3)
            parts.full = False
            mesh_key.save(tmp_path / "key", ring(3))
            await trio.sleep(10)
            assert parts.all_use(ring(3))

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_key_that_changed_while_the_daemon_started_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rotation waits for this daemon to take the key up, and its start has read the file before."""

    async def scenario() -> None:
        async with watched(monkeypatch, tmp_path / "key", written=2) as parts:
            await trio.sleep(3)
            assert parts.all_use(ring(2))

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
