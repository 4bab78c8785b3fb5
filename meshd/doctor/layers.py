"""Findings about layers: what nobody holds, what hangs on one node, and who holds layers that nobody may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshd.doctor.finding import Document, Documents, Finding, at, shell, span
from meshd.vocabulary import BARRED, stored_name


def findings(documents: Documents) -> Iterator[Finding]:
    """In order of urgency."""
    yield from _missing(documents)
    yield from _single(documents)
    yield from _not_admitted(documents)


def hangs_on(documents: Documents) -> list[dict[str, Any]]:
    """For each node, the layers that are gone when it dies; nodes without such layers are left out."""
    found: dict[str, list[list[int]]] = {}
    for start, end, name in documents.hive.get("single", ()):
        ranges = found.setdefault(name, [])
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] = end
        else:
            ranges.append([start, end])
    return [{"name": name, "layers": ranges} for name, ranges in found.items()]


def _start(documents: Documents, layers: str) -> str:
    """A node for these layers, on another device of the room."""
    model = documents.hive.get("model")
    mesh = documents.me.get("mesh")
    return shell(
        *("meshd", "start"),
        *(("--model", str(model)) if model else ()),
        *("--layers", layers),
        *(("--join", str(mesh)) if mesh else ()),
    )


def _missing(documents: Documents) -> Iterator[Finding]:
    hive = documents.hive
    if hive.get("status") == "no model":
        model = "smollm2-135m"
        remedy = "name a model on any node; the others find it"
        yield Finding("no_model", "error", "this room has no model", remedy, shell("meshd", "start", "--model", model))
        return
    coming = {tuple(load["layers"]): load["name"] for load in hive.get("loading", ())}
    for gap in hive.get("missing", ()):
        takers = [name for layers, name in coming.items() if layers[0] <= gap[0] and gap[1] <= layers[1]]
        text = f"nobody serves layers {span(gap)}: no request can be answered"
        if takers:
            remedy, command = f"{', '.join(takers)} is loading them: wait", shell("meshd", "wait", "--ready")
            yield Finding("missing_layers", "error", text, remedy, command, tuple(takers))
        elif drained := _drained(documents, [gap]):
            yield Finding("missing_layers", "error", text, *_resume(drained))
        else:
            remedy = "start a node for them on a device with room left"
            yield Finding("missing_layers", "error", text, remedy, _start(documents, span(gap)))


def _drained(documents: Documents, ranges: Sequence[Sequence[int]]) -> list[Document]:
    """Who holds some of these layers and takes no work: they are there, and need no second node."""
    return [
        peer
        for peer in documents.serving
        if peer["state"] == "draining"
        and any(peer["layers"][0] < end and start < peer["layers"][1] for start, end in ranges)
    ]


def _resume(drained: Sequence[Document]) -> tuple[str, str, tuple[str, ...]]:
    """Remedy, command and names for layers that drained nodes hold."""
    names = tuple(str(peer["name"]) for peer in drained)
    held = ", ".join(
        f"{name} (drained) holds {span(peer['layers'])}" for name, peer in zip(names, drained, strict=True)
    )
    command = " && ".join(shell("meshd", "resume", *at(peer)) for peer in drained)
    return f"{held}: let it take work again", command, names


def _single(documents: Documents) -> Iterator[Finding]:
    for each in hangs_on(documents):
        layers = ", ".join(span(pair) for pair in each["layers"])
        text = f"layers {layers} hang on {each['name']} alone: when it dies, the room stops answering"
        if drained := _drained(documents, each["layers"]):
            remedy, command, names = _resume(drained)
            yield Finding("single_replica", "warning", text, remedy, command, (each["name"], *names))
        else:
            remedy = "start a second node for them on another device"
            command = _start(documents, span(each["layers"][0]))
            yield Finding("single_replica", "warning", text, remedy, command, (each["name"],))


def _not_admitted(documents: Documents) -> Iterator[Finding]:
    by_name = {peer.get("name"): peer for peer in documents.everybody}
    for each in documents.hive.get("not_admitted", ()):
        peer = by_name.get(each["name"], {})
        if peer.get("admitted") is not False or peer.get("incompatible") or peer.get("admission") == BARRED:
            continue  # not yet probed, a matter of versions, or somebody's will
        model = stored_name(str(peer.get("model") or documents.hive.get("model") or ""))
        text = f"{each['name']} computed something else than its layers should and gets no traffic: {each['reason']}"
        remedy = (
            "its copy of the weights, its memory or its torch is broken: take it out, fetch the model again, start it"
        )
        command = (
            f"{shell('meshd', 'drain', *at(peer))} && {shell('meshd', 'rm', model)} && {shell('meshd', 'pull', model)}"
        )
        yield Finding("not_admitted", "error", text, remedy, command, (each["name"],))
