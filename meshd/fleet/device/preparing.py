"""Does what a device needs beside meshd, and undoes it: each preparation is a check, a change and its undoing, in POSIX sh.

A check exits 0 (as it should be), 10 (to be changed) or 20 (cannot be changed by us; what it prints says what to do). The undo
script is stored before the change is made, so a power cut in between leaves nothing that `remove` does not know.
"""

from __future__ import annotations

from typing import Any

from meshd.fleet.device import places
from meshd.fleet.device.shell import Trouble, privilege, run

FINE, TO_DO, NOT_OURS = 0, 10, 20
_PATH = "PATH=$PATH:/usr/sbin:/sbin\n"


def check(preparations: list[dict[str, Any]]) -> list[dict[str, str]]:
    """For each: ``state`` fine, todo or warn, and what there is to say."""
    answers = []
    for preparation in preparations:
        done = run(["sh", "-c", _PATH + preparation["check"]], privileged=True)
        if done.code == FINE:
            state, text = "fine", ""
        elif done.code == TO_DO and preparation["needs_root"] and privilege() == "user":
            state, text = "warn", f"{preparation['change']}: needs root or sudo without a password"
        elif done.code == TO_DO:
            state, text = "todo", preparation["change"]
        else:
            state, text = "warn", f"{preparation['name']}: {done.last_line}"
        answers.append({"name": preparation["name"], "state": state, "text": text})
    return answers


def do(preparation: dict[str, Any]) -> None:
    """Make the change; afterwards the check must say fine. Raises Trouble."""
    name = preparation["name"]
    script = places.undo() / name
    if preparation["undo"] and not script.exists():
        places.write_whole(script, preparation["undo"], 0o700)
    done = run(["sh", "-e", "-c", _PATH + preparation["do"]], timeout_s=600, privileged=preparation["needs_root"])
    if done.code:
        raise Trouble(f"{preparation['change']}: {done.last_line}")
    if run(["sh", "-c", _PATH + preparation["check"]], privileged=True).code == TO_DO:
        raise Trouble(f"{preparation['change']}: done, and without effect")


def undo_all() -> list[str]:
    """Take everything back, the last first; the names. A step that fails keeps its script and raises Trouble."""
    undone = []
    scripts = sorted(places.undo().glob("*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for script in scripts:
        done = run(["sh", "-e", "-c", _PATH + places.read(script)], timeout_s=120, privileged=True)
        if done.code:
            raise Trouble(f"undoing {script.name}: {done.last_line}; what was to be run is in {script}")
        script.unlink()
        undone.append(script.name)
    return undone
