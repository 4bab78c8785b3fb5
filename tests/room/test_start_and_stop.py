"""Exit statuses and the one line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import daemon, meshd, one_line, ports

pytestmark = pytest.mark.daemon


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        (["--layers", "15..45", "--model", "hash:30"], 1, "layers 15..45"),
        (["--model", "no/such model"], 2, "--model"),
        (["--join", "http://127.0.0.1:8090"], 2, "--join"),
        (["--join", "127.0.0.1:8090"], 2, "mesh port"),
        (["--http", "192.0.2.1:80"], 2, "meshd key new"),
        (["--mesh-key", "/nonexistent/key"], 1, "--mesh-key"),
        (["--api-key-file", "/nonexistent/key"], 1, "--api-key-file"),
        (["--http", "192.0.2.1:80", "--insecure-lan"], 1, "--http"),
        (["--mesh", "192.0.2.1:80", "--insecure-lan"], 1, "--mesh"),
        (["--kv-reserve", "lots"], 2, "--kv-reserve"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: list[str], status: int, named: str) -> None:
    http, mesh = ports()
    given = [*([] if "--http" in flags else ["--http", http]), *([] if "--mesh" in flags else ["--mesh", mesh]), *flags]
    ran = daemon(*given, home=tmp_path)
    assert ran.returncode == status, ran.stderr
    assert named in one_line(ran.stderr)
    assert not ran.stdout or '"ready"' not in ran.stdout


def test_a_key_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    http, mesh = ports()
    (tmp_path / "mesh.key").write_text("no key\n")
    (tmp_path / "mesh.key").chmod(0o600)
    for flags in ([], ["--mesh-key", str(tmp_path / "mesh.key")]):
        ran = daemon("--http", http, "--mesh", mesh, *flags, home=tmp_path)
        assert ran.returncode == 1, ran.stderr
        assert "mesh.key" in one_line(ran.stderr)
    (tmp_path / "mesh.key").unlink()
    (tmp_path / "node.key").write_text("no key\n")
    ran = daemon("--http", http, "--mesh", mesh, home=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "node.key" in one_line(ran.stderr)


def test_commands_that_find_nobody(tmp_path: Path) -> None:
    (url,) = ports(count=1)
    for command in (["peers"], ["hive", "--check"], ["ask", "hello"], ["status", "--json"], ["drain"]):
        ran = meshd(*command, MESHD_URL=f"http://{url}")
        assert ran.returncode == 1, ran.stderr
        assert url in one_line(ran.stderr)


def test_another_nodes_http_port_is_refused_with_its_mesh_port(tmp_path: Path) -> None:
    with LocalRoom("hash:2", common=("--capacity-mb", "1000")) as room:
        node = room.add("n1")
        room.wait()
        http, mesh = ports()
        ran = daemon("--http", http, "--mesh", mesh, "--join", node.http, home=tmp_path)
        assert ran.returncode == 2, ran.stderr
        assert node.mesh in one_line(ran.stderr)
        ready = [event for event in node.events() if event["ev"] == "ready"]
        assert [event["layers"] for event in ready] == [[0, 2]]  # told once, and not before there is something to ask
        (listening,) = (event for event in node.events() if event["ev"] == "listening")
        assert "meshd key new" in listening["hint"]
