"""``meshd pull | models | rm``: the model store of this device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from meshd.cli import qspec
from meshd.cli.bars import bars
from meshd.cli.room import Json, StateDir, console, model_name, state_dir
from meshd.models.hash_model import is_hash_model, parse_hash_model
from meshd.models.store import ModelStore, StoredModel
from meshd.vocabulary import MB, ModelSpec, stored_name


def pull(
    name: Annotated[
        str, typer.Argument(help="smollm2-135m, org/name on the hub, a folder of safetensors, or a .gguf file.")
    ],
    state: StateDir = None,
    as_json: Json = False,
) -> None:
    """Fetch a model into the store: verified, resumed after a break, its qspec recorded."""
    store = ModelStore.under(state_dir(state))
    model = _pull(name, store)
    if as_json:
        typer.echo(json.dumps(_document(model)))
    else:
        typer.echo(
            f"{model.name} {model.spec.num_layers} layers {model.disk_bytes // MB} MB digest {model.spec.digest}"
        )


def models(state: StateDir = None, as_json: Json = False) -> None:
    """What is in the store."""
    found = ModelStore.under(state_dir(state)).models()
    if as_json:
        typer.echo(json.dumps([_document(model) for model in found], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "layers", "dtype", "MB", "qspec", "digest"):
        table.add_column(heading)
    for model in found:
        table.add_row(
            model.name,
            str(model.spec.num_layers),
            model.spec.dtype,
            str(model.disk_bytes // MB),
            "yes" if model.qspec.exists() else "no",
            model.spec.digest,
        )
    console.print(table if found else "no models yet: meshd pull smollm2-135m")


def remove(
    name: Annotated[str, typer.Argument(help="A name as `meshd models` shows it.")],
    state: StateDir = None,
) -> None:
    """Forget a model and free its disk."""
    freed = ModelStore.under(state_dir(state)).remove(model_name(name))
    typer.echo(f"removed {name}: {freed // MB} MB freed")


def ensure(name: str) -> tuple[ModelSpec, Path | None]:
    """A model by name, pulled if absent, and the store it is in (None: the rehearsal model needs none)."""
    if is_hash_model(name):
        return parse_hash_model(name).spec, None
    store = ModelStore.under(state_dir(None))
    found = store.find(name)
    if found is None:
        _pull(stored_name(name), store)
        found = store.get(name)
    return found.spec, store.root


def _pull(name: str, store: ModelStore) -> StoredModel:
    from meshd.models.pull import pull as fetch

    with bars() as progress:

        def record(folder: Path) -> None:
            if qspec.can_record():
                qspec.record(folder, progress=progress)

        model = fetch(name, store, progress, record)
    if model.manifest.missing_files:
        _warn(f"{', '.join(model.manifest.missing_files)} missing: only the other layers can be served, and not proven")
    elif not model.qspec.is_file():
        _warn(
            "no qspec: recording it needs torch (pip install '.[engine]' in the checkout); neighbours that have one share it"
        )
    return model


def _warn(text: str) -> None:
    typer.echo(f"meshd: warning: {text}", err=True)


def _document(model: StoredModel) -> dict[str, object]:
    return {
        "name": model.name,
        "digest": model.spec.digest,
        "dtype": model.spec.dtype,
        "num_layers": model.spec.num_layers,
        "bytes": model.disk_bytes,
        "qspec": model.qspec.exists(),
        "path": str(model.path),
    }
