"""What a daemon is as a process: small, without the libraries it keeps out, quiet, and without children of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import MB, PROMPT, children, mapped_bytes, meshd, noise

pytestmark = pytest.mark.daemon
KEPT_OUT = ("torch", "numpy", "tokenizers", "safetensors", "transformers", "gguf")


def test_a_daemon_is_small(four_halves: LocalRoom) -> None:
    with four_halves.client("e0") as client:
        client.post("/chain", {"prompt": PROMPT, "max_tokens": 64})
        client.get("/mesh/hive")
    for name, node in four_halves.nodes.items():
        assert node.process is not None
        pid = node.process.pid
        mapped = Path(f"/proc/{pid}/maps").read_text()
        for library in KEPT_OUT:
            assert f"/{library}/" not in mapped, f"{name} has loaded {library}"
        assert mapped_bytes(pid, "VmRSS") <= 64 * MB
        assert children(pid) == []


def test_it_has_nothing_to_complain_of(four_halves: LocalRoom) -> None:
    for name in four_halves.nodes:
        said = [line for line in noise(four_halves, name).splitlines() if not line.startswith("INFO ")]
        assert not said, f"{name}: {said[:5]}"


def test_commands_see_the_room(four_halves: LocalRoom) -> None:
    url = four_halves.nodes["e0"].url
    for command in (["wait", "--ready", "--nodes", "5", "--replicas", "2"], ["hive", "--check"], ["peers"], ["routes"]):
        ran = meshd(*command, MESHD_URL=url)
        assert (ran.returncode, ran.stderr) == (0, ""), command
    asked = meshd("ask", "--raw", "--max-tokens", "8", "--show-route", PROMPT, MESHD_URL=url)
    assert asked.returncode == 0
    assert " -> " in asked.stderr
