"""meshd's own Python environment: built beside the one in use, then switched to by one rename.

An environment is named by what is in it (its stamp), so the same wheel is never installed twice, and the one before stays for
a way back. It is built in its final place, because scripts in it name that place; `complete` is written last.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

from meshd.fleet.device import places, service
from meshd.fleet.device.shell import Trouble, must, run

COMPLETE = "complete.json"
TORCH_CPU = "https://download.pytorch.org/whl/cpu"  # PyPI's torch for Linux brings 2 GB of CUDA
INSTALL_S = 3600.0  # torch over a slow line, onto an SD card


def current() -> str:
    """The stamp in use, "" for none."""
    link = places.environment()
    return link.readlink().name if link.is_symlink() and described(link.readlink().name) is not None else ""


def described(stamp: str) -> dict[str, Any] | None:
    """What a complete environment says of itself: version, engine, warning."""
    text = places.read(places.environments() / stamp / COMPLETE)
    return dict(json.loads(text)) if stamp and text else None


def build(request: dict[str, Any], wheels: BinaryIO) -> dict[str, Any]:
    """Install what ``wheels`` (a tar) and the network hold. Without torch it is an entry, and the answer says why.

    One at a time: a build goes on when whoever asked for it is gone, and who asks again waits for it and finds it done."""
    places.home().mkdir(mode=0o700, parents=True, exist_ok=True)
    with (places.home() / "building").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _built(request, wheels)


def _built(request: dict[str, Any], wheels: BinaryIO) -> dict[str, Any]:
    place = places.environments() / request["stamp"]
    if (found := described(request["stamp"])) is not None:
        return found
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    carried = place / "wheels"
    with tarfile.open(fileobj=wheels, mode="r|") as tar:
        # Debian 12's 3.11.2 has neither the filters nor an argument for them; what is sent is the administrator's own.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        tar.extractall(carried)  # noqa: S202 - filtered where that is known
    venv = [sys.executable, "-m", "venv"]
    if request["system_site_packages"]:
        venv.append("--system-site-packages")
        if run([sys.executable, "-c", "import pip"]).code == 0:
            venv.append("--without-pip")  # the system's is seen from inside, and this saves a minute on a Pi
    must([*venv, place], "no Python environment can be made", timeout_s=600)
    warning = ""
    if request["engine"]:
        warning = _with_engine(place, carried, request)
    if not request["engine"] or warning:
        _pip(place, carried, request, [request["wheel"]])
    tried = [place / "bin/python", "-c", "import meshd.daemon; print(meshd.__version__)"]
    version = must(tried, "the installed meshd does not run").split()[-1]
    shutil.rmtree(carried)
    about = {"version": version, "engine": bool(request["engine"] and not warning), "warning": warning}
    places.write_whole(place / COMPLETE, json.dumps(about))
    return about


def _with_engine(place: Path, carried: Path, request: dict[str, Any]) -> str:
    """Install torch too; why not, if it cannot be."""
    try:
        _pip(place, carried, request, [f"{request['wheel']}[engine]"])
        must([place / "bin/python", "-c", "import torch, transformers"], "torch does not run here", timeout_s=300)
    except Trouble as trouble:
        return f"without torch, so an entry without layers: {trouble}"
    return ""


def _pip(place: Path, carried: Path, request: dict[str, Any], what: list[str]) -> None:
    """``what`` names files of the carried wheels."""
    sources = ["--find-links", str(carried)]
    if request["offline"]:
        sources.append("--no-index")
    elif sys.platform == "linux" and not shutil.which("nvidia-smi"):
        sources += ["--extra-index-url", TORCH_CPU]
    pip: list[str | Path] = [
        place / "bin/python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
    ]
    names = [str(carried / name) for name in what]
    must([*pip, *sources, *names], f"pip install {what[0]}", timeout_s=INSTALL_S)
    if not (place / "bin/meshd").exists():  # a meshd among the system's packages contented pip, and is not this one
        only_ours = ["--ignore-installed", "--no-deps", str(carried / request["wheel"])]
        must([*pip, *sources, *only_ours], f"pip install {what[0]}", timeout_s=INSTALL_S)


def switch(stamp: str) -> str:
    """Use this environment from the next start on; the stamp of the one before. Older ones go, but for the one that a daemon runs
    in: it would find no Python for its next worker."""
    before = current()
    link = places.environment()
    fresh = link.with_name(".env.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(places.environments() / stamp)
    fresh.replace(link)
    running = service.running()
    words = places.read(Path(f"/proc/{running}/cmdline")) if running is not None else ""
    for other in places.environments().iterdir():
        if other.name not in (stamp, before) and f"/{other.name}/" not in words:
            shutil.rmtree(other, ignore_errors=True)
    return before
