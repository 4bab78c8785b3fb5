"""The text of what starts meshd at boot: pure, so that it can be read in a test.

With systemd a unit. Without it a script that restarts meshd when it dies (`run`), started by cron at boot or by Termux:Boot.
Exit status 2 (wrong usage) is not retried: it would fail for ever.
"""

from __future__ import annotations

import shlex
from pathlib import Path

CRON_MARK = "# meshd"
STOP_S = 45  # more than the daemon's own drain, less than a patient administrator


def _unit_word(text: str) -> str:
    """A word of ExecStart as systemd reads it: % is a specifier, $ a variable, quotes and backslashes are escapes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


# What a system unit may do besides computing and talking; a user's own systemd may not set most of it.
_WALLS = """\
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictNamespaces=yes
CacheDirectory=meshd
Environment=XDG_CACHE_HOME=/var/cache/meshd
"""


def unit(meshd: Path, state: Path, *, user: str | None, author: str = "mass-equip") -> str:
    """The systemd unit. ``user``: who a system unit runs as; None makes it a unit of the user's own systemd.

    The daemon says when it is up and feeds the watchdog: one that hangs is started anew, as one that dies is."""
    who = f"User={user}\n" if user else ""
    walls = f"{_WALLS}ReadWritePaths={_unit_word(str(state))}\n" if user else ""
    return f"""\
# Written by {author}; overwritten by its next run.
[Unit]
Description=meshd, a node of the room
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
WatchdogSec=30
{who}ExecStart={_unit_word(str(meshd))} start --state-dir {_unit_word(str(state))}
Restart=always
RestartSec=2
RestartPreventExitStatus=2
KillMode=mixed
TimeoutStopSec={STOP_S}
OOMPolicy=continue
LimitNOFILE=65536
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
{walls}
[Install]
WantedBy={"multi-user.target" if user else "default.target"}
"""


def run_script(home: Path, meshd: Path, state: Path, *, look_s: float = 60) -> str:
    """`run`: keeps meshd running until it is told to stop by SIGTERM; one of it at a time. Every ``look_s`` a long log is made
    short: a daemon that never ends would fill the disk."""
    return f"""\
#!/bin/sh
# Written by mass-equip; overwritten by its next run. Keeps meshd running where there is no systemd.
home={shlex.quote(str(home))}
before=$(cat "$home/run.pid" 2>/dev/null)
if [ -n "$before" ] && [ "$before" != $$ ] && grep -q "$home/run" "/proc/$before/cmdline" 2>/dev/null; then exit 0; fi
echo $$ > "$home/run.pid"
child= stopping=
trap 'stopping=1; [ -z "$child" ] || kill "$child" 2>/dev/null' TERM INT
trap '' HUP
command -v termux-wake-lock >/dev/null && termux-wake-lock
while sleep {look_s} && kill -0 $$ 2>/dev/null; do
    # The daemon appends: cut off under it, the log goes on at its new end.
    [ "$(wc -c < "$home/log" 2>/dev/null || echo 0)" -le 10000000 ] || {{ cp "$home/log" "$home/log.1"; : > "$home/log"; }}
done > /dev/null 2>&1 &
shortens=$!
while [ -z "$stopping" ]; do
    {shlex.quote(str(meshd))} start --state-dir {shlex.quote(str(state))} >> "$home/log" 2>&1 < /dev/null &
    child=$!
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done  # a trapped signal ends a wait early
    child=
    [ "$status" -ne 2 ] || break
    [ -n "$stopping" ] || sleep 2
done
kill "$shortens" 2>/dev/null
rm -f "$home/run.pid"
"""


def cron_table(before: str, home: Path) -> str:
    """The user's crontab with our line in it, once; every other line as it was."""
    return without_cron_line(before) + f"@reboot setsid {shlex.quote(str(home / 'run'))} >/dev/null 2>&1 {CRON_MARK}\n"


def without_cron_line(before: str) -> str:
    """The user's crontab as it was before us."""
    kept = [line for line in before.splitlines() if not line.endswith(CRON_MARK)]
    return "".join(f"{line}\n" for line in kept)


def termux_script(home: Path) -> str:
    """What Termux:Boot runs once the phone is up."""
    return f"#!/data/data/com.termux/files/usr/bin/sh\nsetsid {shlex.quote(str(home / 'run'))} >/dev/null 2>&1 &\n"
