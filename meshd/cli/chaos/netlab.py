"""The network: one namespace a host, joined by a bridge in another, faults by nftables in the bridge.

Nothing of it is visible in the root namespace, and no host has a way out. Names carry this process's id, so that labs of several
processes live side by side; `down` removes whatever carries it. Losses and cuts are directed and belong to the switch: the host
notices nothing, as in a room. Linux, root, iproute2 and nftables; `lacking` says what is missing. Raises LocalError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from meshd.errors import LocalError

_NEW_NET: Final = 0x40000000  # CLONE_NEWNET
_SWITCH_RULES = """
table bridge netlab {
    set cut { type ifname . ifname; }
    set lossy { type ifname . ifname; }
    chain lossrule { }
    chain forwarded { type filter hook forward priority 0; policy accept;
        iifname . oifname @cut drop
        iifname . oifname @lossy jump lossrule
    }
}
"""


def lacking() -> str:
    """What this machine lacks for a lab; "" when it has everything."""
    if os.geteuid() != 0:
        return "network namespaces need root (sudo)"
    missing = [tool for tool in ("ip", "nft", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing; apt-get install -y iproute2 nftables util-linux"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


def tool(*words: str, text: str = "") -> str:
    """Run ip or nft; its output. Raises LocalError with what it said."""
    ended = subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=30)
    if ended.returncode != 0:
        raise LocalError(f"{' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout


class NetLab:
    """``hosts`` hosts, numbered from 0. A context manager."""

    def __init__(self, hosts: int, subnet: str = "10.77.0") -> None:
        self.hosts = hosts
        self._subnet = subnet
        self._prefix = f"lab{os.getpid()}"
        self._switch = f"{self._prefix}-switch"

    def namespace(self, host: int) -> str:
        return f"{self._prefix}-h{host}"

    def address(self, host: int) -> str:
        return f"{self._subnet}.{host + 1}"

    def __enter__(self) -> NetLab:
        self.down()
        try:
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _build(self) -> None:
        tool("ip", "netns", "add", self._switch)
        tool(
            "ip",
            "-n",
            self._switch,
            "link",
            "add",
            "br0",
            "type",
            "bridge",
            "forward_delay",
            "0",
            "mcast_snooping",
            "0",
        )
        tool("ip", "-n", self._switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            self._plug_in(host)
        tool("ip", "netns", "exec", self._switch, "nft", "-f", "-", text=_SWITCH_RULES)

    def _plug_in(self, host: int) -> None:
        namespace, port = self.namespace(host), f"p{host}"
        tool("ip", "netns", "add", namespace)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
        tool("ip", "-n", self._switch, "link", "add", port, *ends)
        tool("ip", "-n", self._switch, "-batch", "-", text=f"link set {port} master br0\nlink set {port} up\n")
        # A default route, as every real host has one: programs ask for it to learn their own address.
        lines = (
            "link set lo up",
            "link set eth0 up",
            f"addr add {self.address(host)}/24 brd + dev eth0",
            "route add default dev eth0",
        )
        tool("ip", "-n", namespace, "-batch", "-", text="".join(f"{line}\n" for line in lines))

    def down(self) -> None:
        """Kill what runs in the lab and remove it, and whatever labs of processes that are no more left behind."""
        listed = [line.split()[0] for line in tool("ip", "netns", "list").splitlines() if line]
        labs = {name: found for name in listed if (found := re.match(r"lab(\d+)-", name))}
        mine = [name for name, lab in labs.items() if int(lab[1]) == os.getpid() or not Path("/proc", lab[1]).exists()]
        for name in mine:
            for pid in tool("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for name in mine:
            tool("ip", "netns", "del", name)

    # --- programs -----------------------------------------------------------------------------------------------------

    def words(self, host: int, command: Sequence[str | Path]) -> list[str]:
        """The command as it runs on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *map(str, command)]

    def inside(self, host: int | None) -> contextlib.AbstractContextManager[None]:
        """The calling thread is on this host (None: in the switch): sockets that it makes meanwhile are, and stay, the host's."""
        return _inside(self._switch if host is None else self.namespace(host))

    def run(self, host: int, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end; output as text."""
        return subprocess.run(
            self.words(host, command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **options,
        )

    # --- faults -------------------------------------------------------------------------------------------------------

    def cut(self, *pairs: tuple[int, int]) -> None:
        """What the first of each pair sends to the second is lost from now on; the other direction is not."""
        self._rules(f"add element bridge netlab cut {{ {_pairs(pairs)} }}")

    def only_cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Exactly these directions are cut from now on."""
        chosen = set(pairs)
        add = [f"add element bridge netlab cut {{ {_pairs(sorted(chosen))} }}"] if chosen else []
        self._rules("flush set bridge netlab cut", *add)

    def part(self, *groups: Iterable[int]) -> None:
        """Hosts of different groups hear nothing of each other."""
        sides = [list(group) for group in groups]
        pairs = [(a, b) for one in sides for other in sides if one is not other for a in one for b in other]
        self.cut(*pairs)

    def lose(self, share: float, pairs: Iterable[tuple[int, int]] | None = None) -> None:
        """Lose this share of packets on directed links (default: all), instead of what was lost before."""
        chosen = pairs or [(a, b) for a in range(self.hosts) for b in range(self.hosts) if a != b]
        self._rules(
            "flush set bridge netlab lossy",
            "flush chain bridge netlab lossrule",
            f"add element bridge netlab lossy {{ {_pairs(chosen)} }}",
            f"add rule bridge netlab lossrule numgen random mod 10000 < {round(share * 10000)} drop",
        )

    def heal(self) -> None:
        """No cuts, no losses."""
        self._rules(
            "flush set bridge netlab cut", "flush set bridge netlab lossy", "flush chain bridge netlab lossrule"
        )

    def plug(self, host: int, *, up: bool) -> None:
        """The host's cable."""
        tool("ip", "-n", self._switch, "link", "set", f"p{host}", "up" if up else "down")

    def _rules(self, *lines: str) -> None:
        tool("ip", "netns", "exec", self._switch, "nft", "-f", "-", text="".join(f"{line}\n" for line in lines))


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net", "rb") as here, open(f"/run/netns/{namespace}", "rb") as there:  # noqa: PTH123  # kept open for their descriptors
        if libc.setns(there.fileno(), _NEW_NET):
            raise LocalError(f"{namespace}: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.setns(here.fileno(), _NEW_NET)


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f'"p{a}" . "p{b}"' for a, b in pairs)
