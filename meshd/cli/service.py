"""``meshd service``: start this device's node at boot, and keep it running.

With systemd a unit (the system's, or the user's own with ``--user``): it waits until the daemon says that it is up, and starts it
anew when it dies or hangs. Without systemd a script that keeps it running, started by cron at boot. Settings belong into
``meshd.toml`` in the state folder: a service has no flags of its own.
"""

from __future__ import annotations

import getpass
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from meshd.cli.room import Json, StateDir
from meshd.config import default_state_dir
from meshd.errors import LocalError
from meshd.fleet.device import boot_files
from meshd.fleet.device.shell import run
from meshd.identity.state_folder import write_whole

AUTHOR: Final = "meshd service install"
NOT_RUNNING: Final = 3
_STOP_S: Final = boot_files.STOP_S + 15
_SYSTEM_UNIT: Final = Path("/etc/systemd/system/meshd.service")

app = typer.Typer(help="Start this device's node at boot and keep it running.", no_args_is_help=True)
User = Annotated[bool, typer.Option("--user", help="A service of the user's own systemd: needs no root.")]


@dataclass(frozen=True, slots=True)
class Service:
    """What would start meshd here. ``kind``: ``systemd``, ``systemd --user`` or ``cron``; ``file``: the unit or the script;
    ``runs_as``: whose node it is."""

    kind: str
    file: Path
    state: Path
    runs_as: str

    @property
    def systemctl(self) -> list[str]:
        return ["systemctl", "--user"] if self.kind.endswith("--user") else ["systemctl"]


@app.command()
def install(user: User = False, state: StateDir = None) -> None:
    """Install it and start it. Again: rewrites it and starts the node anew.

    It has no flags: settings (model, join …) are read from meshd.toml in the state folder."""
    service = _service(user=user, state=state)
    _check_rights(service)
    service.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() == 0 and service.runs_as != "root":
        shutil.chown(service.state, service.runs_as)
    if service.kind == "cron":
        _install_cron(service)
    else:
        _install_unit(service)
    typer.echo(f"installed and started ({service.kind}): {service.file}")
    typer.echo(f"settings: {service.state / 'meshd.toml'}; then run this again")


@app.command()
def uninstall(user: User = False, state: StateDir = None) -> None:
    """Stop the node and remove the service. The state folder stays."""
    service = _service(user=user, state=state)
    if not service.file.exists():
        typer.echo("not installed")
        return
    _check_rights(service)
    if service.kind == "cron":
        _set_cron(boot_files.without_cron_line(_cron_now()))
        _end_keeper(service)
        service.file.unlink()
    else:
        _must([*service.systemctl, "disable", "--now", "meshd"], timeout_s=_STOP_S)
        service.file.unlink()
        _must([*service.systemctl, "daemon-reload"])
    typer.echo(f"removed ({service.kind}); {service.state} stays")


@app.command()
def status(user: User = False, state: StateDir = None, as_json: Json = False) -> None:
    """Installed and running, or not. Exit 0 running, 3 not."""
    service = _service(user=user, state=state)
    document = describe(service)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(" ".join(f"{key}={value}" for key, value in document.items()))
    if not document["running"]:
        raise typer.Exit(NOT_RUNNING)


def describe(service: Service) -> dict[str, Any]:
    """The document of ``status --json``."""
    pid = _keeper(service) if service.kind == "cron" else None
    if service.kind != "cron" and service.file.exists():
        told = run([*service.systemctl, "show", "meshd", "--property=MainPID,ActiveState"]).text
        facts = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
        pid = int(facts.get("MainPID") or 0) or None
    return {
        "kind": service.kind,
        "file": str(service.file),
        "installed": service.file.exists(),
        "running": pid is not None,
        "pid": pid,
        "state_dir": str(service.state),
    }


# --- which kind -------------------------------------------------------------------------------------------------------


def has_systemd() -> bool:
    """systemd runs this device."""
    return Path("/run/systemd/system").is_dir()


def _service(*, user: bool, state: Path | None) -> Service:
    owner = getpass.getuser() if user or not os.environ.get("SUDO_USER") else os.environ["SUDO_USER"]
    folder = (state or _state_of(owner)).absolute()
    if not has_systemd():
        return Service("cron", folder / "service" / "run", folder, owner)
    if user:
        return Service("systemd --user", Path.home() / ".config/systemd/user/meshd.service", folder, owner)
    return Service("systemd", _SYSTEM_UNIT, folder, owner)


def _state_of(owner: str) -> Path:
    """The state folder of whoever called sudo: his keys and models are there."""
    if owner == getpass.getuser():
        return default_state_dir()
    return Path(pwd.getpwnam(owner).pw_dir) / ".local/share/meshd"


def _check_rights(service: Service) -> None:
    if service.kind == "systemd" and os.geteuid() != 0:
        raise LocalError(
            "a system service needs root: `sudo meshd service …`, or --user for a service of your own (starts at your login"
            " unless `loginctl enable-linger` is allowed)"
        )


def _program() -> Path:
    """The console script of this installation: a service has no PATH to find it on."""
    program = Path(sys.executable).with_name("meshd")
    if not program.exists():
        raise LocalError(f"no {program}: install meshd with pip into the environment of {sys.executable}")
    return program


# --- systemd ----------------------------------------------------------------------------------------------------------


def _install_unit(service: Service) -> None:
    of_system = service.kind == "systemd"
    text = boot_files.unit(_program(), service.state, user=service.runs_as if of_system else None, author=AUTHOR)
    service.file.parent.mkdir(parents=True, exist_ok=True)
    service.file.write_text(text, encoding="utf-8")
    service.file.chmod(0o644)
    _must([*service.systemctl, "daemon-reload"])
    _must([*service.systemctl, "enable", "meshd"])
    _must([*service.systemctl, "restart", "meshd"], timeout_s=_STOP_S + 90)
    if not of_system and run(["loginctl", "enable-linger"]).code:
        typer.echo("it starts at your login, not at boot: `sudo loginctl enable-linger $USER` cures that", err=True)


def _must(words: list[str], *, timeout_s: float = 60.0) -> None:
    done = run(words, timeout_s=timeout_s)
    if done.code:
        raise LocalError(f"{' '.join(words)}: {done.last_line}; journalctl -u meshd says more")


# --- without systemd --------------------------------------------------------------------------------------------------


def _install_cron(service: Service) -> None:
    if shutil.which("crontab") is None:
        raise LocalError("neither systemd nor cron: nothing here starts a program at boot; install cron")
    home = service.file.parent
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    script = boot_files.run_script(home, _program(), service.state).replace("mass-equip", AUTHOR)
    write_whole(service.file, script.encode())
    service.file.chmod(0o700)
    _set_cron(boot_files.cron_table(_cron_now(), home))
    _end_keeper(service)
    # In a session of its own and nobody's child: it stays when this process goes.
    subprocess.run(  # noqa: S603 - our own script
        ["/bin/sh", "-c", '"$0" </dev/null >/dev/null 2>&1 &', str(service.file)], start_new_session=True, check=True
    )


def _cron_now() -> str:
    table = run(["crontab", "-l"])
    return table.text if table.code == 0 else ""  # no crontab yet is an error to crontab


def _set_cron(table: str) -> None:
    done = run(["crontab", "-"], text=table)
    if done.code:
        raise LocalError(f"the crontab cannot be changed: {done.last_line}")


def _keeper(service: Service) -> int | None:
    """The pid of the script that keeps the daemon running."""
    try:
        pid = int((service.file.parent / "run.pid").read_text(encoding="ascii"))
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if str(service.file).encode() in words else None


def _end_keeper(service: Service) -> None:
    """It passes SIGTERM on to the daemon and ends after it."""
    pid = _keeper(service)
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    give_up = time.monotonic() + _STOP_S
    while _keeper(service) is not None:
        if time.monotonic() >= give_up:
            raise LocalError(f"process {pid} does not end; look at it with: ps -fp {pid}")
        time.sleep(0.1)
