"""The boot service on this device: which kind, installed or not, started and stopped *for sure*.

The kernel's lock on the state folder tells whether a daemon lives there: it goes with the process, however that ended. A daemon
that somebody started by hand holds it too and is stopped the same way, because two cannot share the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from meshd.fleet.device import boot_files, places
from meshd.fleet.device.shell import Trouble, must, privilege, run

SYSTEM_UNIT = Path("/etc/systemd/system/meshd.service")


def kind() -> str:
    """``systemd``, ``systemd --user``, ``termux``, ``cron`` or ``none`` (nothing here starts a program at boot)."""
    if places.is_termux():
        return "termux"
    if Path("/run/systemd/system").is_dir():
        if privilege() != "user":
            return "systemd"
        if run(["systemctl", "--user", "show-environment"], timeout_s=10).code == 0:
            return "systemd --user"
    return "cron" if shutil.which("crontab") else "none"


def _user_unit() -> Path:
    return Path.home() / ".config/systemd/user/meshd.service"


def _termux_script() -> Path:
    return Path.home() / ".termux/boot/meshd"


def _wanted(service: str) -> dict[Path, str]:
    """The files of a kind and what they must hold."""
    script = boot_files.run_script(places.home(), places.meshd(), places.state())
    if service == "systemd":
        return {SYSTEM_UNIT: boot_files.unit(places.meshd(), places.state(), user=getpass.getuser())}
    if service == "systemd --user":
        return {_user_unit(): boot_files.unit(places.meshd(), places.state(), user=None)}
    found = {places.home() / "run": script}
    if service == "termux":
        found[_termux_script()] = boot_files.termux_script(places.home())
    return found


def _cron_now() -> str:
    table = run(["crontab", "-l"])
    return table.text if table.code == 0 else ""  # no crontab yet is an error to crontab


def is_installed() -> bool:
    """Everything as it should be, so that a second run changes nothing."""
    service = kind()
    if any(places.read(path) != text for path, text in _wanted(service).items()):
        return False
    if service == "cron":
        return boot_files.cron_table(_cron_now(), places.home()) == _cron_now()
    if service == "systemd":
        return run(["systemctl", "is-enabled", "meshd"]).code == 0
    return service != "systemd --user" or run(["systemctl", "--user", "is-enabled", "meshd"]).code == 0


def install() -> None:
    """Write and enable; does not start."""
    service = kind()
    for path, text in _wanted(service).items():
        if path == SYSTEM_UNIT:
            copy = places.home() / "meshd.service"
            places.write_whole(copy, text, 0o644)
            must(["install", "-m", "644", copy, path], f"{path} cannot be written", privileged=True)
        else:
            places.write_whole(path, text, 0o644 if path.suffix == ".service" else 0o755)
    if service == "cron":
        _set_cron(boot_files.cron_table(_cron_now(), places.home()))
    elif service == "systemd":
        must(["systemctl", "daemon-reload"], "systemctl daemon-reload", privileged=True)
        must(["systemctl", "enable", "meshd"], "systemctl enable meshd", privileged=True)
    elif service == "systemd --user":
        must(["systemctl", "--user", "daemon-reload"], "systemctl --user daemon-reload")
        must(["systemctl", "--user", "enable", "meshd"], "systemctl --user enable meshd")


def uninstall() -> None:
    """Undo `install`; the daemon must have been stopped."""
    service = kind()
    if service == "systemd" and SYSTEM_UNIT.exists():
        run(["systemctl", "disable", "meshd"], privileged=True)
        must(["rm", "-f", SYSTEM_UNIT], f"{SYSTEM_UNIT} cannot be removed", privileged=True)
        run(["systemctl", "daemon-reload"], privileged=True)
    elif service == "systemd --user" and _user_unit().exists():
        run(["systemctl", "--user", "disable", "meshd"])
        _user_unit().unlink()
        run(["systemctl", "--user", "daemon-reload"])
    elif service == "termux":
        _termux_script().unlink(missing_ok=True)
    if shutil.which("crontab") and (before := _cron_now()) != (after := boot_files.without_cron_line(before)):
        _set_cron(after)


def _set_cron(table: str) -> None:
    done = run(["crontab", "-"], text=table)
    if done.code:
        raise Trouble(f"the crontab cannot be changed: {done.last_line}")


def boot_warning() -> str:
    """Why this device may not be back after a reboot; "" when it will."""
    service = kind()
    if service == "none":
        return (
            f"neither systemd nor cron: nothing starts it at boot; install cron, or start {places.home()}/run yourself"
        )
    if service == "cron" and not any(run(["pgrep", "-x", name]).code == 0 for name in ("cron", "crond")):
        return "cron is installed but does not run: start it, or the device does not come back after a reboot"
    if service == "termux" and not Path("/data/data/com.termux.boot").exists():
        return "install the Termux:Boot app and open it once, or the phone does not come back after a reboot"
    return ""


# --- the daemon's process ---------------------------------------------------------------------------------------------


def running() -> int | None:
    """The pid of the daemon that holds the state folder; None when there is none."""
    try:
        with (places.state() / "lock").open("rb") as file:
            pid = int(file.read(20).decode("ascii", "replace").strip() or 0)
            if pid <= 0 or not _alive(pid):
                return None  # asked before the lock, which a starting daemon would find taken for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return pid
            return None  # the pid is another program's now
    except (OSError, ValueError):
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def stop() -> None:
    """The daemon and whatever restarts it are gone when this returns. Raises Trouble."""
    service = kind()
    if service == "systemd" and SYSTEM_UNIT.exists():
        run(["systemctl", "stop", "meshd"], timeout_s=boot_files.STOP_S + 15, privileged=True)
    elif service == "systemd --user" and _user_unit().exists():
        run(["systemctl", "--user", "stop", "meshd"], timeout_s=boot_files.STOP_S + 15)
    _end(_keeper)  # first: it passes SIGTERM on, and would restart a daemon that ended without it
    _end(running)


def _end(find: Callable[[], int | None]) -> None:
    """Ask, wait, then kill. Raises Trouble."""
    for number, patience_s in ((signal.SIGTERM, boot_files.STOP_S), (signal.SIGKILL, 10)):
        if (pid := find()) is None:
            return
        _signal(pid, number)
        give_up = time.monotonic() + patience_s
        while find() is not None and time.monotonic() < give_up:
            time.sleep(0.1)
    if (pid := find()) is not None:
        raise Trouble(f"process {pid} holds {places.state()} and does not end; look at it with: ps -fp {pid}")


def _keeper() -> int | None:
    """The pid of `run`."""
    text = places.read(places.home() / "run.pid").strip()
    if not text.isdigit():
        return None
    words = places.read(Path(f"/proc/{text}/cmdline"))
    return int(text) if str(places.home() / "run") in words else None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        must(["kill", f"-{int(number)}", str(pid)], f"process {pid} cannot be stopped", privileged=True)


def start() -> None:
    """Start it the way that a boot does."""
    service = kind()
    if service == "systemd":
        must(["systemctl", "restart", "meshd"], "systemctl restart meshd", privileged=True)
    elif service == "systemd --user":
        must(["systemctl", "--user", "restart", "meshd"], "systemctl --user restart meshd")
    else:
        subprocess.Popen(  # noqa: S603 - our own script; it stays when this process goes
            [str(places.home() / "run")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def last_words() -> str:
    """The end of the log: why it does not come up."""
    service = kind()
    if service.startswith("systemd"):
        user = ["--user"] if service.endswith("--user") else []
        return run(["journalctl", *user, "-u", "meshd", "-n", "3", "-o", "cat", "--no-pager"], privileged=not user).text
    with contextlib.suppress(OSError), places.log().open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-3:])
    return ""
