"""Hosts with sshd and an administrator's machine beside them, for tests of whole commands."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshd.cli.chaos.netlab import NetLab
from tests.fleet.numbers import FLAGS, MODEL
from tests.netlab.machine import Machine, site_packages

ROOT = Path(__file__).resolve().parent.parent.parent
HOSTS = 5
PATIENCE_S = 90.0
LEDGER = "/root/.config/meshd/fleet"


class Town:
    """``hosts`` are n1 to n5; ``office`` is where the commands run. All have the same Python, and this test's packages."""

    def __init__(self, net: NetLab, place: Path) -> None:
        self.place = place
        site = site_packages(place / "site")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / "key"], check=True, timeout=30)
        public = (place / "key.pub").read_text()
        self.hosts = [Machine(net, i, f"n{i + 1}", place / f"n{i + 1}", site) for i in range(HOSTS)]
        self.office = Machine(net, HOSTS, "office", place / "office", site)
        for machine in (*self.hosts, self.office):
            machine.make(public)
        shutil.copy(place / "key", self.office.home / "key")
        self.office.boot()
        self.wheels = wheels(ROOT, place / "wheels")

    def off(self) -> None:
        for machine in (*self.hosts, self.office):
            machine.power_off()

    def words(self, *words: str | Machine) -> list[str]:
        """A mass-equip command."""
        named = [f"root@{word.address}" if isinstance(word, Machine) else word for word in words]
        common = ["--wheels", str(self.wheels), "--system-site-packages", "-i", "/root/key", "--json"]
        return ["python3", f"{ROOT}/deploy/mass-equip", *named, *common, "--wait", str(PATIENCE_S)]

    def command(self, *words: str | Machine, expect: int = 0) -> dict[str, Any]:
        """Run mass-equip; its document."""
        ended = self.office.run(self.words(*words))
        assert ended.returncode == expect, f"{words}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return dict(json.loads(ended.stdout))

    def equip(self, *hosts: Machine, expect: int = 0) -> dict[str, Any]:
        return self.command(*hosts, "--model", MODEL, f"--flags={FLAGS}", expect=expect)

    def get(self, path: str, host: Machine) -> Any:
        """A document of a host's daemon, asked there; None while it does not answer."""
        code = (
            f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8090{path}', timeout=20).read().decode())"
        )
        ended = host.run(["python3", "-c", code])
        return json.loads(ended.stdout) if ended.returncode == 0 else None

    def healthy(self, replicas: int = 2) -> bool:
        """Every running host sees every layer so often, proven."""
        hives = [self.get("/mesh/hive", host) for host in self.hosts if host.is_on]
        return all(hive is not None and hive["min_replicas"] >= replicas and not hive["not_admitted"] for hive in hives)

    def daemon(self, host: Machine) -> int:
        """The pid of its daemon, inside; 0 for none."""
        ended = host.run(["pgrep", "-f", "meshd start"])
        return int(ended.stdout.split()[0]) if ended.returncode == 0 else 0

    @contextmanager
    def streams(self, *entries: Machine) -> Iterator[dict[str, Any]]:
        """Eight clients for as long as the block lasts; what they saw is in the dict after it."""
        urls = [f"http://{host.address}:8090" for host in entries]
        words = ["PYTHONPATH=" + str(ROOT), "python3", "-m", "tests.fleet.streams", f"{LEDGER}/mesh.key", *urls]
        inside = self.office.words(words)
        process = subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        seen: dict[str, Any] = {}
        try:
            yield seen
        finally:
            output, _ = process.communicate("", timeout=120)
        seen.update(json.loads(output))


def wheels(source: Path, place: Path) -> Path:
    """A folder with the wheel of a checkout. The network is needed only where setuptools is too old to build it."""
    isolated = [] if int(version("setuptools").partition(".")[0]) < 77 else ["--no-build-isolation"]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        *isolated,
        "-w",
        str(place),
    ]
    subprocess.run([*pip, str(source)], check=True, timeout=300, stdout=subprocess.DEVNULL)
    return place


def newer(source: Path, place: Path, version: str) -> Path:
    """The same checkout with another version."""
    place.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source / name, place / name)
    shutil.copytree(source / "meshd", place / "meshd", ignore=shutil.ignore_patterns("__pycache__"))
    init = place / "meshd/__init__.py"
    lines = init.read_text().splitlines()
    init.write_text(
        "\n".join(f'__version__ = "{version}"' if line.startswith("__version__") else line for line in lines)
    )
    return place


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Wait for a condition; its value."""
    give_up = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.2)
    return value


def kill(host: Machine, pid: int) -> None:
    """kill -9 on a host."""
    host.run(["kill", f"-{int(signal.SIGKILL)}", str(pid)])
