"""``meshd qspec``: record what an honest node computes for the golden prompts, in a process that has torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshd.cli.bars import bars
from meshd.cli.room import Json, StateDir, model_name, state_dir
from meshd.errors import LocalError
from meshd.models.hash_model import is_hash_model
from meshd.models.progress import Progress
from meshd.models.qspec_file import QspecFile
from meshd.models.store import QSPEC_FILE, ModelStore


def qspec(
    model: Annotated[str, typer.Argument(help="A name as `meshd models` shows it.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write there instead of beside the model.")] = None,
    state: StateDir = None,
    as_json: Json = False,
) -> None:
    """Record a model's qspec again: what admission compares a node's arithmetic with."""
    if is_hash_model(model):
        raise LocalError(f"{model} needs no qspec: every node computes what is expected of it")
    stored = ModelStore.under(state_dir(state)).get(model_name(model))
    if not can_record():
        raise LocalError("recording a qspec needs torch: pip install '.[engine]' in the checkout")
    with bars() as progress:
        path = record(stored.path, out, progress)
    found = QspecFile(path, stored.manifest.spec)
    document = {"model": stored.name, "digest": found.digest, "prompts": len(found.golden), "path": str(path)}
    typer.echo(json.dumps(document) if as_json else f"{stored.name}: {len(found.golden)} golden prompts in {path}")


def can_record() -> bool:
    """True where the engine is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def record(folder: Path, out: Path | None = None, progress: Progress = lambda *_: None) -> Path:
    """Record in a child process; the file. ``progress`` hears of the model's bytes. LocalError with the child's last words."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.name != QSPEC_FILE)
    command = [sys.executable, "-m", "meshd.inference.worker.record_qspec", str(folder)]
    command += ["--out", str(out)] if out is not None else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:  # noqa: S603  no shell, our own module
        if child.stdout is None or child.stderr is None:
            raise LocalError("recording the qspec did not start")
        for line in child.stdout:
            done, _, total = line.partition(" ")
            if done.isdigit() and total.strip().isdigit():
                progress("qspec", int(done) * size // int(total), size)
        said = child.stderr.read().strip().splitlines()
    if child.returncode != 0:
        raise LocalError(f"the qspec was not recorded: {said[-1] if said else f'exit {child.returncode}'}")
    return out if out is not None else folder / QSPEC_FILE
