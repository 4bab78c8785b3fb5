"""Restarts a node that serves without the room noticing: never below one replica of what it holds, and only when drained."""

from __future__ import annotations

from typing import Any, Final

from meshd.fleet.ssh import DeviceFailed
from meshd.fleet.work import Fleet, Worker, came_up, until

REDUNDANCY_S: Final = 240.0
"""A room that is moving layers around settles within this; one that never will is said. A node stays on a range for two minutes
before it looks for a thinner one, and each restart before this one began that anew."""

DRAIN_S: Final = 60


def alone_with(hive: dict[str, Any], layers: list[int] | None) -> list[list[int]]:
    """The ranges that only a holder of ``layers`` has: what would be missing without it. Pure."""
    if layers is None:
        return []
    start, end = layers
    return [[max(start, a), min(end, b)] for a, b, replicas in hive["stages"] if a < end and b > start and replicas < 2]


def restart(worker: Worker, fleet: Fleet, *, version: str, accept_gap: bool = False) -> dict[str, Any]:
    """Wait until others hold its layers, drain, restart, wait until it serves and is admitted. What it says of itself then."""
    if not accept_gap:
        _wait_for_others(worker)
    worker.doing("draining")
    if left := worker.ask("drain", patience_s=DRAIN_S)["left"]:
        worker.outcome.warnings.append(f"restarted while work ran: {left}")
    worker.doing("restarting")
    before = worker.ask("restart")["before"]
    worker.doing("waiting until it serves")
    seen = came_up(worker, version=version, before=before, wait_s=fleet.wait_s)
    wait_until_admitted(worker, fleet.workers, seen, fleet.wait_s)
    return seen


def _wait_for_others(worker: Worker) -> None:
    alone: list[list[int]] = []

    def held_elsewhere() -> bool:
        seen = worker.ask("look")
        if "hive" not in seen:
            return True  # it does not answer: a restart takes nothing away
        alone[:] = alone_with(seen["hive"], seen["status"]["layers"])
        return not alone

    def lacking() -> str:
        ranges = ", ".join(f"{start}..{end}" for start, end in alone)
        return f"layers {ranges} are on this device alone; add a device, or say --accept-gap"

    worker.doing("waiting until its layers are held elsewhere")
    until(held_elsewhere, REDUNDANCY_S, lacking)


def wait_until_admitted(worker: Worker, others: list[Worker], seen: dict[str, Any], wait_s: float) -> None:
    """Another node has proven it. A node without layers has nothing to prove, the only one of a room nobody to ask."""
    watchers = [other for other in others if other is not worker and other.outcome.facts.get("node_id")]
    if not watchers or not seen["status"]["layers"]:
        return
    worker.doing("waiting until it is admitted")
    me = seen["status"]["node_id"]
    last: dict[str, Any] = {}

    def admitted() -> bool:
        for watcher in watchers:
            try:
                peers = watcher.ask("look").get("peers")
            except DeviceFailed:
                continue
            if peers is not None:
                last.clear()
                last.update(next((peer for peer in peers if peer["node_id"] == me), {}), by=str(watcher.device))
                return last.get("admitted") is True
        return False

    def lacking() -> str:
        if "node_id" not in last:
            return f"{last.get('by', 'nobody')} does not see it: are its mesh port (TCP and UDP) open to the others?"
        return f"{last['by']} has not admitted it: {last['incompatible'] or last['admission'] or 'no verdict yet'}"

    until(admitted, wait_s, lacking)
