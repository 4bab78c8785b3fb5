"""Where a device's own daemon is asked, whatever it was told to listen on."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.fleet.device import main, places, room
from meshd.fleet.device.shell import Done


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)


@pytest.mark.parametrize(
    ("told", "url"),
    [
        ("", "http://127.0.0.1:8090"),
        ('http = "0.0.0.0:9000"', "http://127.0.0.1:9000"),
        ('http = "[::]:9000"', "http://[::1]:9000"),
        ('http = "::"', "http://[::1]:8090"),
        ('http = "[fd00::5]"', "http://[fd00::5]:8090"),
        ('http = "fd00::5"', "http://[fd00::5]:8090"),
        ('http = "10.0.0.5"', "http://10.0.0.5:8090"),
        ('http = "10.0.0.5:9000"', "http://10.0.0.5:9000"),
    ],
)
def test_a_drain_goes_where_the_daemon_listens(told: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places.write_whole(places.state() / "meshd.toml", told)
    ran: list[list[str]] = []

    def run(words: list[object], **_more: object) -> Done:
        ran.append([str(word) for word in words])
        return Done(0, "drained")

    monkeypatch.setattr(main, "run", run)
    assert room.url() == url
    assert main._drain({"patience_s": 5}) == {"left": ""}
    assert ran[0][ran[0].index("--url") + 1] == url


def test_a_damaged_file_is_said() -> None:
    places.write_whole(places.state() / "meshd.toml", "http = ")
    with pytest.raises(OSError, match=r"meshd\.toml"):
        room.url()
