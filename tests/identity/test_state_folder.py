"""One daemon per state folder; errors name the folder and the flag."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshd.errors import StateError
from meshd.identity.state_folder import LOCK_FILE, StateFolder, write_whole

_HOLD = """
import sys
from pathlib import Path
from meshd.identity.state_folder import StateFolder
with StateFolder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_daemon_is_told_the_folder_the_flag_and_the_pid(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StateError) as caught:
            StateFolder(state).__enter__()
        holder.kill()
        holder.wait()
    for word in (str(state), "--state-dir", str(holder.pid)):
        assert word in caught.value.message
    with StateFolder(state):
        assert (state / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_the_lock_ends_with_the_context(tmp_path: Path) -> None:
    for _ in range(2):
        with StateFolder(tmp_path):
            pass


@pytest.mark.parametrize("bad", ["file/state", "file"])
def test_a_folder_that_cannot_be_made_names_itself_and_the_flag(tmp_path: Path, bad: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="--state-dir") as caught:
        StateFolder(tmp_path / bad).__enter__()
    assert str(tmp_path / bad) in caught.value.message


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "epoch"
    write_whole(path, b"1")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with StateFolder(tmp_path) as folder, pytest.raises(StateError, match="No space left"):
        folder.write("epoch", b"2")
    assert path.read_bytes() == b"1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch", "lock"]


def test_files_are_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with StateFolder(state) as folder:
        folder.write("secret", b"x")
    assert state.stat().st_mode & 0o777 == 0o700
    assert (state / "secret").stat().st_mode & 0o777 == 0o600
