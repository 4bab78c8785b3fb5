"""Rooms written down in a line: directories for routing tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from meshd.directory import Directory, Member
from meshd.routing.bandit import BanditPlanner
from meshd.vocabulary import Advert, Capability, Health, LayerRange, NodeId, NodeStatus

DIGEST = "d" * 64
NAMES = {DIGEST: "smollm2-135m"}


def node(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def member(
    number: int,
    layers: tuple[int, int],
    *,
    total: int = 30,
    layer_ms: float = 1.0,
    state: NodeStatus = NodeStatus.ALIVE,
    admitted: bool | None = True,
    arith: str = "a",
    health: Health | None = None,
    claim_ratio: float | None = None,
    name: str = "",
) -> Member:
    advert = Advert(
        node_id=node(number),
        name=name or f"n{number}",
        epoch=1,
        incarnation=1,
        addresses=(),
        model="smollm2-135m",
        digest=DIGEST,
        arith=arith,
        num_layers=total,
        layers=LayerRange(*layers),
        generation=1,
        capability=Capability(layer_ms_1=layer_ms),
    )
    return Member(advert, state, health or Health(), admitted, claim_ratio=claim_ratio)


def room(*members: Member, me: int = 1) -> Directory:
    return Directory(node(me)).replace(members)


def change(directory: Directory, number: int, **fields: object) -> Directory:
    """The directory after one member changed."""
    changed = (replace(m, **fields) if key == node(number) else m for key, m in directory.members.items())  # type: ignore[arg-type]  # keyword names are the tests'
    return directory.replace(changed)


def without(directory: Directory, *numbers: int) -> Directory:
    gone = {node(number) for number in numbers}
    return directory.replace(m for key, m in directory.members.items() if key not in gone)


def lanes(count: int, layer_ms: Iterable[float] | None = None) -> Directory:
    """Nodes that each hold the whole model."""
    speeds = list(layer_ms) if layer_ms is not None else [1.0] * count
    return room(*(member(i + 1, (0, 30), layer_ms=speeds[i]) for i in range(count)))


def rows(planner: BanditPlanner, directory: Directory, now: float) -> list[dict[str, Any]]:
    """The candidates of ``/v1/routing``."""
    found: list[dict[str, Any]] = planner.table(directory, NAMES, now=now)["models"]["smollm2-135m"]["candidates"]
    return found
