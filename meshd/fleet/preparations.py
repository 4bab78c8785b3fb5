"""What beside meshd would stop it on a device, as data: a check, a change and its undoing, in POSIX sh.

Pure text: the device runs it (device/preparing.py, which also says what a check's exit status means). Whatever is not there
(no Wi-Fi, no ufw, no systemd) is fine as it is. An undo that depends on what was there before reads it where the change wrote
it down, under /var/lib/meshd-undo.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

KEEP: Final = "/var/lib/meshd-undo"  # what a change found, for its undo; root's, as the changes are


@dataclass(frozen=True, slots=True)
class Preparation:
    """``change`` says in a few words what ``do`` does: it is what --dry-run shows."""

    name: str
    change: str
    check: str
    do: str
    undo: str
    needs_root: bool = True

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def preparations(http_port: int, mesh_port: int) -> list[Preparation]:
    """All of them, in the order in which they are done."""
    ports = ((http_port, "tcp"), (mesh_port, "tcp"), (mesh_port, "udp"), (5353, "udp"))
    return [_venv(), _ufw(ports), _firewalld(ports), _nft(ports), _wifi(), _sleep(), _time(), _linger()]


Ports = tuple[tuple[int, str], ...]


def _venv() -> Preparation:
    return Preparation(
        name="venv",
        change="install python3-venv",
        check=(
            "python3 -c 'import ensurepip, venv' 2>/dev/null && exit 0\n"
            "command -v apt-get >/dev/null && exit 10\n"
            "echo 'this Python has no venv; install it with the package manager'; exit 20\n"
        ),
        do="DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3-venv\n",
        undo="",  # a package that others may use by now
    )


def _ufw(ports: Ports) -> Preparation:
    numbers = [f"{port}/{kind}" for port, kind in ports]
    return Preparation(
        name="ufw",
        change=f"allow {' '.join(numbers)} in ufw",
        check=(
            "command -v ufw >/dev/null || exit 0\n"
            "rules=$(ufw status) || exit 0\n"
            'case $rules in *"Status: active"*) ;; *) exit 0 ;; esac\n'
            f"for port in {' '.join(numbers)}; do\n"
            '    echo "$rules" | grep -q "^$port .*ALLOW" || exit 10\n'
            "done\n"
        ),
        do="".join(f"ufw allow {number} comment meshd\n" for number in numbers),
        undo="".join(f"ufw delete allow {number} || true\n" for number in numbers),
    )


def _firewalld(ports: Ports) -> Preparation:
    numbers = [f"{port}/{kind}" for port, kind in ports]
    return Preparation(
        name="firewalld",
        change=f"open {' '.join(numbers)} in firewalld",
        check=(
            "command -v firewall-cmd >/dev/null && firewall-cmd --state >/dev/null 2>&1 || exit 0\n"
            f"for port in {' '.join(numbers)}; do firewall-cmd --query-port=$port >/dev/null || exit 10; done\n"
        ),
        do="".join(f"firewall-cmd --permanent --add-port={number}\n" for number in numbers) + "firewall-cmd --reload\n",
        undo="".join(f"firewall-cmd --permanent --remove-port={number}\n" for number in numbers)
        + "firewall-cmd --reload\n",
    )


def _nft(ports: Ports) -> Preparation:
    """Rules that somebody wrote by hand are theirs to change: a wrong guess locks the administrator out."""
    rules = "; ".join(f"{kind} dport {port} accept" for port, kind in ports)
    return Preparation(
        name="nftables",
        change="",
        check=(
            "command -v nft >/dev/null || exit 0\n"
            "for tool in ufw firewall-cmd; do command -v $tool >/dev/null && exit 0; done\n"
            "rules=$(nft list ruleset 2>/dev/null) || exit 0\n"
            'echo "$rules" | grep -q "hook input.*policy drop" || exit 0\n'
            f'echo "$rules" | grep -q "dport.*{ports[1][0]}" && exit 0\n'
            f"echo 'the input chain drops what it does not name; add to it: {rules}'; exit 20\n"
        ),
        do="",
        undo="",
    )


def _wifi() -> Preparation:
    """Power save lets a radio sleep through datagrams: seconds of silence that look like a death."""
    each = "for device in $(iw dev 2>/dev/null | sed -n 's/^[[:space:]]*Interface //p'); do"
    rule = 'ACTION=="add", SUBSYSTEM=="net", KERNEL=="wl*", RUN+="/usr/sbin/iw dev $name set power_save off"'
    return Preparation(
        name="wifi-power-save",
        change="switch Wi-Fi power save off, now and at boot",
        check=f'{each} iw dev "$device" get power_save | grep -qw on && exit 10; done\nexit 0\n',
        do=(
            f'{each} iw dev "$device" set power_save off; done\n'
            f"printf '%s\\n' '{rule}' > /etc/udev/rules.d/70-meshd-wifi.rules\n"
            "if [ -d /etc/NetworkManager/conf.d ]; then\n"
            "    printf '[connection]\\nwifi.powersave = 2\\n' > /etc/NetworkManager/conf.d/meshd-wifi.conf\n"
            "fi\n"
        ),
        undo=(
            "rm -f /etc/udev/rules.d/70-meshd-wifi.rules /etc/NetworkManager/conf.d/meshd-wifi.conf\n"
            f'{each} iw dev "$device" set power_save on || true; done\n'
        ),
    )


_SLEEP_TARGETS: Final = "sleep.target suspend.target hibernate.target hybrid-sleep.target"


def _sleep() -> Preparation:
    keys = ("HandleLidSwitch", "HandleLidSwitchExternalPower", "HandleSuspendKey", "IdleAction")
    settings = "".join(f"{line}\\n" for line in ("[Login]", *(f"{key}=ignore" for key in keys)))
    return Preparation(
        name="sleep",
        change="never sleep, not with the lid shut either",
        check=(
            "[ -d /run/systemd/system ] || exit 0\n"
            "[ -f /etc/systemd/logind.conf.d/meshd.conf ] || exit 10\n"
            f'for target in {_SLEEP_TARGETS}; do [ "$(systemctl is-enabled $target 2>/dev/null)" = masked ] || exit 10; done\n'
        ),
        do=(
            f"mkdir -p /etc/systemd/logind.conf.d {KEEP}\n"
            f"[ -f {KEEP}/masked ] || for target in {_SLEEP_TARGETS}; do\n"
            f'    [ "$(systemctl is-enabled $target 2>/dev/null)" = masked ] || echo $target\n'
            f"done > {KEEP}/masked\n"
            f"systemctl mask {_SLEEP_TARGETS}\n"
            f"printf '{settings}' > /etc/systemd/logind.conf.d/meshd.conf\n"
            "systemctl kill -s HUP systemd-logind || true\n"
        ),
        undo=(
            f"if [ -s {KEEP}/masked ]; then systemctl unmask $(cat {KEEP}/masked); fi\n"
            f"rm -f {KEEP}/masked /etc/systemd/logind.conf.d/meshd.conf\n"
            "systemctl kill -s HUP systemd-logind || true\n"
        ),
    )


def _time() -> Preparation:
    """meshd does not read the wall clock, but certificates of package servers do."""
    return Preparation(
        name="time",
        change="switch network time on",
        check=(
            "[ -d /run/systemd/system ] && command -v timedatectl >/dev/null || exit 0\n"
            '[ "$(timedatectl show -p CanNTP --value)" = yes ] || exit 0\n'
            '[ "$(timedatectl show -p NTP --value)" = yes ] || exit 10\n'
        ),
        do="timedatectl set-ntp true\n",
        undo="timedatectl set-ntp false\n",
    )


def _linger() -> Preparation:
    """A user's services end with the last login, unless the user lingers. A system service needs none of this."""
    return Preparation(
        name="linger",
        change="let the user's services run without a login",
        check=(
            '[ -d /run/systemd/system ] && [ "$(id -u)" != 0 ] || exit 0\n'
            '[ "$(loginctl show-user "$(id -un)" -p Linger --value 2>/dev/null)" = yes ] || exit 10\n'
        ),
        do="loginctl enable-linger\n",
        undo="loginctl disable-linger\n",
        needs_root=False,
    )
