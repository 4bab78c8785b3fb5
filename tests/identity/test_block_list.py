"""A barred node is barred without a restart."""

from pathlib import Path

import pytest

from meshd.errors import StateError
from meshd.identity.block_list import BlockList
from meshd.vocabulary import NodeId

ONE, TWO = NodeId("1" * 32), NodeId("a" * 32)


def test_the_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "blocked"
    barred = BlockList(path)
    assert ONE not in barred
    path.write_text(f"# lost laptop\n{ONE}\n")
    assert ONE in barred
    path.write_text(f"{TWO.upper()}  # the tablet\n\n")
    assert ONE not in barred
    assert TWO in barred
    path.unlink()
    assert TWO not in barred


def test_a_line_that_is_no_id_is_named(tmp_path: Path) -> None:
    path = tmp_path / "blocked"
    path.write_text(f"{ONE}\nlaptop\n")
    with pytest.raises(StateError, match=f"{path}, line 2: 'laptop'"):
        BlockList(path).read()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be read"):
        BlockList(tmp_path).read()


def test_a_file_damaged_later_leaves_the_last_good_list_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "blocked"
    path.write_text(f"{ONE}\n")
    barred = BlockList(path)
    assert ONE in barred
    path.write_text(f"{ONE}\n{TWO}\noops\n")
    assert ONE in barred
    assert TWO not in barred
    assert caplog.text.count("line 3: 'oops'") == 1
    path.write_text(f"{TWO}\n")
    assert TWO in barred
    assert ONE not in barred
