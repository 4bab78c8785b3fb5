"""README.md names tests that exist, and every file here."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
NAMED = re.findall(r"`([a-z0-9_/]+\.py)::(test_\w+)`", (TESTS / "cases" / "README.md").read_text(encoding="utf-8"))


def test_what_the_table_names_exists() -> None:
    assert NAMED
    lost = [f"{file}::{name}" for file, name in NAMED if f"\ndef {name}(" not in (TESTS / file).read_text("utf-8")]
    assert not lost


def test_no_file_is_left_out() -> None:
    here = {path.name for path in (TESTS / "cases").glob("test_*.py")} - {Path(__file__).name}
    assert here == {Path(file).name for file, _ in NAMED if file.startswith("cases/")}
