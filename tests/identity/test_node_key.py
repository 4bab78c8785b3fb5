"""The node's identity lasts, its epoch rises, and nothing is replaced silently."""

import hashlib
from pathlib import Path

import pytest

from meshd.errors import StateError
from meshd.identity import node_key
from meshd.identity.node_key import EPOCH_FILE, KEY_FILE, begin_run, raise_epoch, renew, show
from meshd.identity.state_folder import StateFolder
from meshd.vocabulary import is_node_id


def test_the_id_lasts_and_the_epoch_rises(tmp_path: Path) -> None:
    runs = []
    for _ in range(3):
        with StateFolder(tmp_path) as folder:
            runs.append(begin_run(folder))
    assert [run.epoch for run in runs] == [1, 2, 3]
    assert len({run.node_id for run in runs}) == 1
    assert len({run.boot for run in runs}) == 3
    key = runs[0].key
    assert is_node_id(key.node_id)
    assert key.node_id == hashlib.sha256(key.public).hexdigest()[:32]
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o077 == 0
    shown = show(tmp_path)
    assert shown is not None
    assert shown.node_id == key.node_id


def test_nothing_to_show_before_the_first_start(tmp_path: Path) -> None:
    assert show(tmp_path) is None


@pytest.mark.parametrize("damage", [None, b"", b"\0\0\0", b"-5", b"9" * 40])
def test_a_lost_epoch_is_replaced_by_a_higher_one(tmp_path: Path, damage: bytes | None) -> None:
    with StateFolder(tmp_path) as folder:
        begin_run(folder)
        for _ in range(4):
            before = raise_epoch(folder)
        if damage is None:
            (tmp_path / EPOCH_FILE).unlink()
        else:
            (tmp_path / EPOCH_FILE).write_bytes(damage)
        assert begin_run(folder).epoch > before


def test_the_epoch_can_be_raised_above_what_the_room_remembers(tmp_path: Path) -> None:
    with StateFolder(tmp_path) as folder:
        begin_run(folder)
        assert raise_epoch(folder, above=77) == 78
        assert begin_run(folder).epoch == 79


@pytest.mark.parametrize("damage", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_damaged_key_is_an_error_and_not_a_new_identity(tmp_path: Path, damage: bytes) -> None:
    with StateFolder(tmp_path) as folder:
        begin_run(folder)
        (tmp_path / KEY_FILE).write_bytes(damage)
        with pytest.raises(StateError, match="meshd identity new"):
            begin_run(folder)
        assert (tmp_path / KEY_FILE).read_bytes() == damage
        renew(folder)
        assert begin_run(folder).epoch == 1


def test_a_key_that_others_can_read_is_refused_with_the_cure(tmp_path: Path) -> None:
    with StateFolder(tmp_path) as folder:
        begin_run(folder)
        (tmp_path / KEY_FILE).chmod(0o644)
        with pytest.raises(StateError, match=f"chmod 600 {tmp_path / KEY_FILE}"):
            begin_run(folder)


def test_renewing_makes_another_node(tmp_path: Path) -> None:
    with StateFolder(tmp_path) as folder:
        old = begin_run(folder)
        assert renew(folder).node_id != old.node_id
        assert begin_run(folder).node_id != old.node_id


def test_the_private_key_shows_in_no_repr() -> None:
    assert "private" not in repr(node_key.NodeKey.generate())
