"""Rooms as documents: a healthy one, and the means to hurt it."""

from __future__ import annotations

from typing import Any

from meshd.doctor.diagnosis import diagnose
from meshd.doctor.finding import Documents, Finding, Probe


def peer(name: str, layers: list[int] | None, **more: Any) -> dict[str, Any]:
    """A PEER object of a node that is well."""
    number = int(name[1:])
    status = {
        "ram_free_mb": 4000,
        "ram_total_mb": 8000,
        "queue_depth": 0,
        "battery_pct": None,
        "on_ac": None,
        "temp_c": None,
        "jammed": False,
    }
    return {
        "node_id": f"{number:032x}",
        "name": name,
        "state": "alive",
        "role": "middle",
        "model": "tiny",
        "digest": "d1",
        "dtype": "bfloat16",
        "arith": "a1",
        "num_layers": 30,
        "layers": layers,
        "loading": None,
        "mesh": f"10.0.0.{number}:8091",
        "http": f"http://10.0.0.{number}:8090",
        "version": "1.2.0",
        "incompatible": None,
        "admitted": True,
        "admission": "",
        "one_way": False,
        "rtt_ms": 1.0,
        "capacity_mb": 2000,
        "layer_ms": 1.0,
        "claim_ratio": 1.0,
        "status": {**status, **more.pop("status", {})},
        **more,
    }


def healthy() -> list[dict[str, Any]]:
    """Two replicas of each half; the first is the node itself."""
    return [peer("n1", [0, 15]), peer("n2", [15, 30]), peer("n3", [0, 15]), peer("n4", [15, 30])]


def hive(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "digest": "d1",
        "num_layers": 30,
        "status": "healthy",
        "missing": [],
        "single": [],
        "loading": [],
        "not_admitted": [],
        **more,
    }


def findings(
    nodes: list[dict[str, Any]] | None = None,
    *,
    of: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    events: list[dict[str, Any]] | None = None,
    probes: tuple[Probe, ...] = (),
    t: float = 0.0,
) -> list[Finding]:
    """What the doctor says of a room that is healthy but for what is given."""
    me, *others = nodes if nodes is not None else healthy()
    documents = Documents.of(
        {"mdns": "on, 3 heard", "name": "n1", **(status or {})},
        {"self": me, "peers": others},
        of or hive(),
        {"models": {}},
        events=events or (),
        probes=probes,
        t=t,
    )
    return diagnose(documents)
