"""What this node tells of itself on ``/status``: pure functions of its parts' states."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshd.inference.engine import Engine
from meshd.inference.keeper import Held
from meshd.vocabulary import Health

LOOKING: Final = "the model is not here: looking for it among the neighbours"  # with --offline, for as long as it takes


def state_of(held: Held, *, draining: str, named: bool, found: bool, pinned: bool, why: str) -> tuple[str, str]:
    """(state, reason). ``draining``: why it does, "" if not; ``named``: a model was asked for; ``found``: it is here;
    ``pinned``: layers were asked for."""
    if draining:
        return "draining", draining
    if held.loading is not None and held.loading.stage == "proving":
        return "proving", held.reason
    if held.state != "observer":
        return held.state, held.reason
    if named and not found:
        return ("starting" if not why or why.startswith("fetching") else "failed"), why or LOOKING
    if found and pinned:
        return "starting", why
    return "observer", why or ("holds no layers yet" if found else "no model named, and none in the room yet")


def settled(state: str, reason: str, *, expects: bool) -> bool:
    """True once it is known what this node is for: it serves layers, or stays an entry without any. ``expects``: it has a model
    or a room to join, so an observer that only waits for its election or for the room's model is not there yet."""
    return state == "ready" or (state == "observer" and not (expects and reason.endswith("yet")))


def with_work(health: Health, engine: Engine | None, in_flight: int) -> Health:
    """The device's health completed with what meshd does on it."""
    if engine is None:
        return replace(health, in_flight=in_flight)
    work = engine.health()
    return replace(
        health,
        in_flight=in_flight,
        queue_depth=work.queue_depth,
        tokens_per_s=work.tokens_per_s,
        kv_used_mb=work.kv_used_bytes >> 20,
        kv_total_mb=work.kv_total_bytes >> 20,
    )
