"""A second daemon where one runs already: it ends at once with a line that names address and flag, and the first goes on."""

from __future__ import annotations

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import PATIENCE_S, PROMPT, daemon, expected, one_line, ports

pytestmark = pytest.mark.daemon


def test_the_second_is_refused_and_the_first_undisturbed(four_halves: LocalRoom) -> None:
    first = four_halves.nodes["n1"]
    process = first.process
    elsewhere = four_halves.home / "second"
    http, mesh = ports()
    refused = {
        "--http": (elsewhere, ["--http", first.http, "--mesh", mesh]),
        "--mesh": (elsewhere, ["--http", http, "--mesh", first.mesh]),
        "--state-dir": (first.home, ["--http", http, "--mesh", mesh]),
    }
    for flag, (home, flags) in refused.items():
        ran = daemon(*flags, "--model", "hash:30", home=home)
        assert ran.returncode == 1
        said = one_line(ran.stderr)
        assert flag in said
        named = {"--http": first.http, "--mesh": first.mesh, "--state-dir": str(first.home)}[flag]
        assert named in said
    four_halves.wait(replicas=2, timeout_s=PATIENCE_S, at=["e0"])
    assert first.process is process
    assert first.alive
    with four_halves.client("n1") as client:
        assert client.post("/chain", {"prompt": PROMPT, "max_tokens": 4})["tokens"] == expected(PROMPT, 4)
