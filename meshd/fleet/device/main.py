"""Which question is answered by what: reads one request from stdin, prints one answer as the last line of stdout.

A request is a JSON line ``{"do": NAME, ...}``, after it whatever bytes the question carries (a tar of wheels). An answer is
``meshd-answer:`` and JSON; the mark tells it from what a login shell prints. A Trouble is ``{"trouble": message}``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from meshd.fleet.device import environments, facts, places, preparing, room, service
from meshd.fleet.device.shell import Trouble, must, run

MARK = "meshd-answer:"
Request = dict[str, Any]


def main() -> None:
    """Answer what stands on stdin."""
    stdin = sys.stdin.buffer
    request = json.loads(stdin.readline())
    try:
        answer = answers(request, stdin)
    except Trouble as trouble:
        answer = {"trouble": str(trouble)}
    except OSError as error:
        answer = {"trouble": f"{request['do']}: {error}"}
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")


def answers(request: Request, payload: BinaryIO) -> dict[str, Any]:
    """The answer to one request. Raises Trouble, OSError."""
    if request["do"] == "build":
        return environments.build(request, payload)
    return _TABLE[request["do"]](request)


def _facts(request: Request) -> dict[str, Any]:
    return {"facts": facts.facts(), "preparations": preparing.check(request["preparations"])}


def _prepare(request: Request) -> dict[str, Any]:
    preparing.do(request["preparation"])
    return {}


def _switch(request: Request) -> dict[str, Any]:
    places.write_whole(places.untold(), "")
    return {"before": environments.switch(request["stamp"])}


def _set_key(request: Request) -> dict[str, Any]:
    if not request["name"]:  # a rotation waits until the running daemon has taken it up
        places.write_whole(places.untold(), "")
    head = "# The mesh key: whoever has this file is a member of the room. The first key sends, all are accepted.\n"
    places.write_whole(places.state() / "mesh.key", head + "".join(f"{line}\n" for line in request["lines"]))
    return {"mesh_ids": _mesh_ids()} if request["name"] else {}


def _get_key(_request: Request) -> dict[str, Any]:
    return {"lines": facts.key_lines(places.read(places.state() / "mesh.key"))}


def _new_key(_request: Request) -> dict[str, Any]:
    """A fresh key, made by the meshd of this device and kept nowhere on it."""
    with tempfile.TemporaryDirectory(dir=places.home()) as folder:
        path = Path(folder) / "mesh.key"
        must([places.meshd(), "key", "new", "--mesh-key", path], "meshd key new")
        return {"lines": facts.key_lines(places.read(path))}


def _mesh_ids() -> list[str]:
    """The public names of this device's keys, as its daemon shows them once it has taken them up."""
    shown = must([places.meshd(), "key", "show", "--json"], "meshd key show")
    return [key["mesh_id"] for key in json.loads(shown)["keys"]]


def _set_config(request: Request) -> dict[str, Any]:
    """Only settings that this device's meshd accepts replace those in force."""
    path = places.state() / "meshd.toml"
    trial = path.with_name("meshd.toml.new")
    places.write_whole(trial, request["text"])
    check = "import sys; from meshd.config import load; load(['--config', sys.argv[1]])"
    judged = run([places.environment() / "bin/python", "-c", check, trial])
    if judged.code:
        trial.unlink()
        raise Trouble(f"meshd does not accept the settings: {judged.last_line.rpartition('UsageError: ')[2]}")
    places.write_whole(places.untold(), "")
    trial.replace(path)
    return {}


def _set_blocked(request: Request) -> dict[str, Any]:
    places.write_whole(places.state() / "blocked", request["text"])
    return {}


def _elect(request: Request) -> dict[str, Any]:
    """Where this device would help most, asked of the live room; remembered as what it held last, so that it starts there."""
    options = ["--capacity-mb", str(request["capacity_mb"])] if request["capacity_mb"] is not None else []
    asked = run([places.meshd(), "elect", "--seed", request["seed"], "--json", *options])
    if asked.code not in (0, 3):  # 3: every range has its target, and this is the one it would strengthen
        raise Trouble(asked.last_line)
    return {"layers": json.loads(next(line for line in asked.text.splitlines() if line.startswith("{")))["layers"]}


def _set_range(request: Request) -> dict[str, Any]:
    text = json.dumps({"digest": request["digest"], "layers": request["layers"]})
    places.write_whole(places.state() / "range.json", text)
    return {}


def _identity(request: Request) -> dict[str, Any]:
    """This device's node id; a new one on request (the daemon is stopped for it)."""
    if request["renew"]:
        service.stop()
        return {"node_id": must([places.meshd(), "identity", "new"], "meshd identity new").split()[-1]}
    shown = run([places.meshd(), "identity", "show"])
    return {"node_id": shown.text.split()[-1] if shown.code == 0 else ""}


def _install_service(_request: Request) -> dict[str, Any]:
    places.write_whole(places.untold(), "")
    service.install()
    return {"service": service.kind()}


def _drain(request: Request) -> dict[str, Any]:
    """Running work is handed over or finished; what is not is said and stays the caller's decision."""
    patience_s = float(request["patience_s"])
    words = ["drain", "--url", room.url(), "--timeout", str(patience_s)]
    done = run([places.meshd(), *words], timeout_s=patience_s + 30)
    return {"left": "" if done.code == 0 else done.last_line}


def _restart(_request: Request) -> dict[str, Any]:
    before = service.running()
    service.stop()
    service.start()
    places.untold().unlink(missing_ok=True)
    return {"before": before}


def _start(_request: Request) -> dict[str, Any]:
    if service.running() is None:
        service.start()
    return {}


def _remove(request: Request) -> dict[str, Any]:
    """Everything that mass-equip brought; with ``purge`` the state folder too (identity, models)."""
    service.stop()
    service.uninstall()
    for name in ("mesh.key", "meshd.toml"):  # a device that left must not keep the room's key, whatever comes next
        (places.state() / name).unlink(missing_ok=True)
    undone = preparing.undo_all()
    shutil.rmtree(places.home(), ignore_errors=True)
    if request["purge"]:
        shutil.rmtree(places.state(), ignore_errors=True)
    return {"undone": undone}


_TABLE: dict[str, Callable[[Request], dict[str, Any]]] = {
    "facts": _facts,
    "prepare": _prepare,
    "switch": _switch,
    "set_key": _set_key,
    "get_key": _get_key,
    "new_key": _new_key,
    "set_config": _set_config,
    "set_blocked": _set_blocked,
    "elect": _elect,
    "set_range": _set_range,
    "identity": _identity,
    "install_service": _install_service,
    "drain": _drain,
    "restart": _restart,
    "start": _start,
    "look": lambda _request: room.look(),
    "remove": _remove,
}
