"""What the device's half does with the wheels that it is sent."""

from __future__ import annotations

import fcntl
import io
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshd.fleet.device import environments, places, service


def test_a_python_whose_tarfile_knows_no_filters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Debian 12, and so most boards, has 3.11.2; the filters came with 3.11.4."""
    carried: list[str] = []
    extractall = tarfile.TarFile.extractall

    def without_filter(self: tarfile.TarFile, path: str | Path = ".", members: Any = None) -> None:
        extractall(self, path, members)
        carried.extend(sorted(entry.name for entry in Path(path).iterdir()))

    monkeypatch.setattr(tarfile.TarFile, "extractall", without_filter)
    monkeypatch.delattr(tarfile, "data_filter")
    monkeypatch.setattr(environments, "must", lambda *_words, **_more: "1.2")
    monkeypatch.setattr(environments, "_pip", lambda *_words: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    with io.BytesIO() as wheels:
        with tarfile.open(fileobj=wheels, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("meshd-1.2-py3-none-any.whl"))
        wheels.seek(0)
        request = {"stamp": "1.2-abc", "wheel": "meshd-1.2-py3-none-any.whl", "engine": False}
        about = environments.build({**request, "system_site_packages": False}, wheels)
    assert carried == ["meshd-1.2-py3-none-any.whl"]
    assert about == {"version": "1.2", "engine": False, "warning": ""}


def test_the_environment_that_a_daemon_runs_in_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two switches without a restart in between: two runs of mass-equip that did not get that far."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for stamp in ("1-old", "1-a", "1-b", "1-c"):
        places.write_whole(places.environments() / stamp / environments.COMPLETE, "{}")
    environments.switch("1-a")
    words = [sys.executable, "-c", "input()", f"{places.environments()}/1-a/bin/meshd"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as daemon:
        monkeypatch.setattr(service, "running", lambda: daemon.pid)
        for stamp in ("1-b", "1-c"):
            places.write_whole(places.environments() / stamp / environments.COMPLETE, "{}")
            environments.switch(stamp)
        daemon.communicate(b"\n", timeout=60)
    assert sorted(path.name for path in places.environments().iterdir()) == ["1-a", "1-b", "1-c"]


def test_a_build_whose_asker_was_cut_off_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(environments, "must", lambda *_words, **_more: pytest.fail("it is being built already"))
    request = {"stamp": "1-a", "wheel": "w", "engine": False, "system_site_packages": False}
    places.home().mkdir()
    with ThreadPoolExecutor(1) as pool, (places.home() / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the first build does
        second = pool.submit(environments.build, request, io.BytesIO())
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)
        places.write_whole(places.environments() / "1-a" / environments.COMPLETE, '{"version": "1"}')
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert second.result(timeout=60) == {"version": "1"}
