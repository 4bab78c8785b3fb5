"""Commands take model names, never paths out of the store: nothing outside it is read into it or removed.

What the HTTP interface makes of such names is tests/api/test_app.py, the store itself tests/models/test_store.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rooms import meshd, one_line

pytestmark = pytest.mark.daemon


@pytest.mark.parametrize("name", ["..", ".", "a/../../b", "../precious", "a\\b", "a%2f..%2fb", "x" * 300])
def test_nothing_outside_the_store_is_touched(tmp_path: Path, name: str) -> None:
    state = tmp_path / "state"
    (state / "models").mkdir(parents=True)
    precious = state / "precious"
    precious.mkdir()
    (precious / "config.json").write_text("{}")
    (state / "node.key.keep").write_text("keep")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if "models" not in path.parts)
    for command in (["rm", name], ["start", "--no-mdns", "--model", name]):
        ran = meshd(*command, "--state-dir", str(state))
        assert ran.returncode in (1, 2), ran.stdout
        one_line(ran.stderr)
    after = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if "models" not in path.parts)
    assert after == before
