"""A host with sshd: its own processes, name, home, /run and crontabs; everything else is this machine's.

Booted as a PID namespace, so that `power_off` takes every process with it at once, as a pulled plug does, and `boot` starts what
a boot starts: sshd and cron, which runs the @reboot jobs. What is written to its home stays in its folder, as on a disk. There
is no systemd.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshd.cli.chaos import netlab
from meshd.cli.chaos.netlab import NetLab

_OWN = ("/root", "/var/spool/cron/crontabs")

# The interpreter may live in a home that is hidden below, so it is bound into the new one first.
_BOOT = """\
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd "$DISK$BASE"
mount --bind "$BASE" "$DISK$BASE"
mount --bind "$SITE" "$DISK$LIBRARY"
for place in $OWN; do mount --rbind "$DISK$place" "$place"; done
hostname "$NAME"
exec "$BASE/bin/python3" "$DISK/init.py" "$DISK/sshd_config"
"""

# PID 1 of the host: starts what a boot starts and buries the dead.
_INIT = """\
import os, subprocess, sys
subprocess.Popen(["cron"])
subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", sys.argv[1]])
while True:
    os.wait()
"""


def lacking() -> str:
    """What this machine lacks for hosts with sshd; "" when it has everything."""
    missing = [name for name in ("/usr/sbin/sshd", "cron", "crontab", "ssh-keygen", "ss") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing; apt-get install -y openssh-server cron iproute2"
    return netlab.lacking()


class Machine:
    """One host of a lab. ``disk``: a folder of its own; ``site``: what its Python has installed (`site_packages`)."""

    def __init__(self, net: NetLab, host: int, name: str, disk: Path, site: Path) -> None:
        self.net, self.host, self.name, self.disk, self._site = net, host, name, disk, site
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return self.net.address(self.host)

    @property
    def is_on(self) -> bool:
        return self._process is not None

    @property
    def home(self) -> Path:
        """Root's home, as seen from outside."""
        return self.disk / "root"

    def make(self, authorized: str) -> None:
        """A fresh disk; whoever holds the private key of ``authorized`` may log in as root."""
        for place in _OWN:
            (self.disk / place.lstrip("/")).mkdir(parents=True)
        (self.disk / "init.py").write_text(_INIT)
        key = self.disk / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
        (self.disk / "authorized_keys").write_text(authorized)
        (self.disk / "sshd_config").write_text(
            f"HostKey {key}\nAuthorizedKeysFile {self.disk}/authorized_keys\nStrictModes no\nUsePAM no\nPidFile none\n"
            f"PermitRootLogin prohibit-password\nSetEnv PATH={sys.base_prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin\n"
        )

    def boot(self) -> None:
        """Power on; returns once sshd listens."""
        environment = {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/root",
            "DISK": str(self.disk),
            "SITE": str(self._site),
            "BASE": sys.base_prefix,
            "LIBRARY": sysconfig.get_path("purelib", vars={"base": sys.base_prefix}),
            "NAME": self.name,
            "OWN": " ".join(_OWN),
        }
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "sh", "-c", _BOOT]
        with (self.disk / "console").open("ab") as console:
            self._process = subprocess.Popen(
                self.net.words(self.host, unshare),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        self._wait(lambda: "LISTEN" in self.net.run(self.host, ["ss", "-Htln", "sport", "=", ":22"]).stdout)

    def power_off(self) -> None:
        """Pull the plug: every process of the host is gone at once."""
        if self._process is None:
            return
        # With --kill-child PID 1 of the host dies with it, and all others with that.
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=30)
        self._process = None
        self._wait(lambda: not netlab.tool("ip", "netns", "pids", self.net.namespace(self.host)).strip())

    def run(self, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run something on the host, as if logged in; stdout and stderr as text."""
        return subprocess.run(self.words(command), capture_output=True, text=True, check=False, **options)

    def words(self, command: Sequence[str | Path]) -> list[str]:
        """The command as it runs on the host."""
        assert self._process is not None, f"{self.name} is off"
        pid = self._process.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        path = f"PATH={sys.base_prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        inside = [
            "nsenter",
            "-t",
            first,
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "env",
            "-i",
            path,
            "HOME=/root",
            "LC_ALL=C.UTF-8",
        ]
        return [*inside, *map(str, command)]

    def _wait(self, condition: Callable[[], bool], patience_s: float = 60) -> None:
        give_up = time.monotonic() + patience_s
        while not condition():
            console = (self.disk / "console").read_text(errors="replace")[-500:]
            ended = self._process is not None and self._process.poll() is not None
            assert not ended, f"{self.name} has ended: {console}"
            assert time.monotonic() < give_up, f"{self.name} is not there: {console}"
            time.sleep(0.05)


def site_packages(place: Path) -> Path:
    """What this test's Python has installed, without this checkout: the distribution's packages of a host."""
    place.mkdir()
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if "meshd" not in item.name:
            (place / item.name).symlink_to(item)
    return place
