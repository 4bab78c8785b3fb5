"""The room as JSON documents: pure functions of the directory and of what this node knows of itself.

Counted for a model: this node once it is ready, and alive, admitted, compatible peers that serve the same digest; of a model that
is not this node's, whose shards it cannot judge, also those that nobody has refuted. Names are
labels (unique in the room) everywhere. ``nodes`` counts who is alive, with layers or without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshd.api.node import NodeFacts
from meshd.api.segments import Segment, covered, missing, segments
from meshd.directory import Directory, Member
from meshd.vocabulary import Advert, Endpoint, LayerRange, ModelSpec, NodeStatus

_ANY: Final = ("0.0.0.0", "::", "")

View = tuple[Directory, NodeFacts, ModelSpec | None]
"""What every document of the room is made of."""


@dataclass(frozen=True, slots=True)
class Hive:
    """What the room holds of one model. ``holders[i]`` is who segment holder index ``i`` means."""

    model: str
    digest: str
    num_layers: int
    holders: tuple[Member, ...]
    stages: tuple[Segment, ...]
    covered: tuple[LayerRange, ...]
    missing: tuple[LayerRange, ...]

    @property
    def whole(self) -> bool:
        """True while a request can find every layer."""
        return self.num_layers > 0 and not self.missing

    @property
    def min_replicas(self) -> int:
        return min((stage.replicas for stage in self.stages), default=0) if self.whole else 0

    @property
    def status(self) -> str:
        if not self.digest or not self.num_layers:
            return "no model"
        if self.missing:
            gaps = ", ".join(str(gap) for gap in self.missing)
            return f"broken: layers {gaps} missing"
        return "healthy" if self.min_replicas > 1 else "healthy (no redundancy)"


def hive_of(directory: Directory, facts: NodeFacts, digest: str, spec: ModelSpec | None = None) -> Hive:
    """What is held of the model ``digest``."""
    serving = [member for member in _present(directory) if member.advert.digest == digest and digest]
    judged = spec is not None and spec.digest == digest
    holders = tuple(member for member in serving if _counts(member, directory, facts, judged=judged))
    if spec is not None and spec.digest == digest:
        model, num_layers = spec.name, spec.num_layers
    else:
        model = next((member.advert.model for member in serving), "")
        num_layers = max((member.advert.num_layers for member in serving), default=0)
    held = segments([member.advert.layers for member in holders if member.advert.layers is not None])
    whole = covered(held)
    return Hive(model, digest, num_layers, holders, tuple(held), tuple(whole), tuple(missing(whole, num_layers)))


def room_digest(directory: Directory, spec: ModelSpec | None) -> str:
    """The model that this node's room means: its own, else the one that most members serve."""
    if spec is not None:
        return spec.digest
    me = directory.me
    if me is not None and me.advert.digest:
        return me.advert.digest
    counts = Counter(member.advert.digest for member in _present(directory) if member.advert.digest)
    return min(counts, key=lambda digest: (-counts[digest], digest), default="")


def served_models(directory: Directory, facts: NodeFacts, spec: ModelSpec | None) -> list[Hive]:
    """Models whose layers are all covered, this room's first."""
    return [hive for hive in known_models(directory, facts, spec) if hive.whole]


def known_models(directory: Directory, facts: NodeFacts, spec: ModelSpec | None) -> list[Hive]:
    """Every model that somebody here means to serve, this room's first."""
    first = room_digest(directory, spec)
    digests = sorted({member.advert.digest for member in _present(directory) if member.advert.digest} | {first})
    digests.sort(key=lambda digest: digest != first)
    return [hive_of(directory, facts, digest, spec) for digest in digests if digest]


def _present(directory: Directory) -> list[Member]:
    """Members that are here, in a stable order."""
    here = (NodeStatus.ALIVE, NodeStatus.SUSPECT, NodeStatus.DRAINING)
    return [member for _, member in sorted(directory.members.items()) if member.state in here]


def _counts(member: Member, directory: Directory, facts: NodeFacts, *, judged: bool) -> bool:
    """``judged``: this node proves shards of that model. Of another it cannot; requests for it are passed on whole to an entry
    that does."""
    if member.advert.layers is None or member.advert.draining:
        return False
    if member.node_id == directory.self_id:
        return facts.state == "ready"
    return member.state is NodeStatus.ALIVE and member.proven(judged=judged) and member.incompatible is None


# --- documents --------------------------------------------------------------------------------------------------------


def hive_json(directory: Directory, facts: NodeFacts, spec: ModelSpec | None) -> dict[str, Any]:
    """``GET /mesh/hive``."""
    hive = hive_of(directory, facts, room_digest(directory, spec), spec)
    present = _present(directory)
    serving = [member for member in present if member.advert.digest == hive.digest and hive.digest]
    counted = {member.node_id for member in hive.holders}

    def name(member: Member) -> str:
        return directory.label(member.node_id)

    return {
        "model": hive.model or None,
        "digest": hive.digest or None,
        "num_layers": hive.num_layers,
        "nodes": sum(_in_room(member, directory, hive.digest) for member in present),
        "stages": [[*stage.layers.json(), stage.replicas] for stage in hive.stages],
        "covered": [layers.json() for layers in hive.covered],
        "missing": [layers.json() for layers in hive.missing],
        "single": [
            [*stage.layers.json(), name(hive.holders[stage.holders[0]])] for stage in hive.stages if stage.replicas == 1
        ],
        "min_replicas": hive.min_replicas,
        "status": hive.status,
        "jammed": [name(member) for member in serving if member.health.jammed],
        "loading": [
            {
                "name": name(member),
                "layers": member.advert.loading.layers.json(),
                "progress": round(member.advert.loading.progress, 3),
            }
            for member in present
            if member.advert.loading is not None
        ],
        "not_admitted": [
            {"name": name(member), "reason": _why_not_admitted(member)}
            for member in serving
            if member.advert.layers is not None
            and member.node_id not in counted
            and (member.admitted is not True or member.incompatible is not None)
        ],
        "entries": [name(member) for member in serving if member.advert.entry and not member.advert.draining],
        "others": _others(present, hive.digest),
    }


def _in_room(member: Member, directory: Directory, digest: str) -> bool:
    """Alive and of this model, or of none yet: an entry without layers is a node of the room too."""
    alive = member.state is NodeStatus.ALIVE or member.node_id == directory.self_id
    return alive and member.advert.digest in ("", digest)


def _why_not_admitted(member: Member) -> str:
    return member.incompatible or member.admission or "not probed yet"


def _others(present: Sequence[Member], digest: str) -> list[dict[str, Any]]:
    found: dict[str, list[Advert]] = {}
    for member in present:
        if member.advert.digest and member.advert.digest != digest:
            found.setdefault(member.advert.digest, []).append(member.advert)
    return [{"model": ads[0].model, "digest": other, "nodes": len(ads)} for other, ads in sorted(found.items())]


def role_of(advert: Advert) -> str:
    """entry holds the first layers, tail the last, lane all of them; an observer holds none."""
    layers = advert.layers
    if layers is None:
        return "observer"
    first, last = layers.start == 0, layers.end >= advert.num_layers > 0
    if first and last:
        return "lane"
    return "entry" if first else "tail" if last else "middle"


def peer_json(member: Member, directory: Directory) -> dict[str, Any]:
    """A PEER object."""
    advert = member.advert
    loading, http = advert.loading, http_of(member) or advert.http
    return {
        "node_id": member.node_id,
        "name": directory.label(member.node_id),
        "state": str(member.state),
        "role": role_of(advert),
        "model": advert.model or None,
        "digest": advert.digest or None,
        "dtype": advert.dtype or None,
        "arith": advert.arith or None,
        "num_layers": advert.num_layers,
        "layers": advert.layers.json() if advert.layers else None,
        "generation": advert.generation,
        "loading": None
        if loading is None
        else {"layers": loading.layers.json(), "stage": loading.stage, "progress": round(loading.progress, 3)},
        "mesh": _mesh_address(member),
        "http": f"http://{http}" if http else None,
        "epoch": advert.epoch,
        "incarnation": advert.incarnation,
        "version": advert.version,
        "wire": advert.wire,
        "incompatible": member.incompatible,
        "last_heard_s": _rounded(member.last_heard_s, 3),
        "admitted": member.admitted,
        "admission": member.admission,
        "one_way": member.one_way,
        "rtt_ms": _rounded(member.rtt_ms, 3),
        "capacity_mb": advert.capability.capacity_mb,
        "layer_ms": round(advert.capability.layer_ms_1, 4),
        "claim_ratio": _rounded(member.claim_ratio, 3),
        "via": member.via,
        "entry": advert.entry,
        "status": member.health.json(),
    }


def http_of(member: Member) -> Endpoint | None:
    """Where a member's HTTP is reached: what listens on every address is reached where its links are."""
    http = member.advert.http
    if http is None or http.host not in _ANY:
        return http
    best = member.source or next(iter(member.advert.addresses), None)
    return Endpoint(best.host, http.port) if best is not None else None


def _mesh_address(member: Member) -> str | None:
    best = member.source or next(iter(member.advert.addresses), None)
    return str(best) if best is not None else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def peers_json(directory: Directory) -> dict[str, Any]:
    """``GET /mesh/peers``."""
    me = directory.me
    return {
        "self": peer_json(me, directory) if me else None,
        "peers": [peer_json(member, directory) for member in directory.peers],
    }


def status_json(directory: Directory, facts: NodeFacts, spec: ModelSpec | None, in_flight: int) -> dict[str, Any]:
    """``GET /status``. ``in_flight``: requests that this node owns now."""
    me = directory.me
    layers = me.advert.layers if me else None
    return {
        **facts.health.json(),
        "in_flight": max(in_flight, facts.health.in_flight),
        "node_id": directory.self_id,
        "name": directory.label(directory.self_id) if me else facts.name,
        "model": spec.name if spec else (me.advert.model or None) if me else None,
        "layers": layers.json() if layers else None,
        "state": facts.state,
        "reason": facts.reason,
        "version": facts.version,
        "uptime_s": round(facts.uptime_s, 1),
        "kv_sessions": facts.kv_sessions,
        "owned": facts.owned,
        "relayed": facts.relayed,
        "mdns": facts.mdns,
        "mesh": facts.mesh,
        "mesh_ids": list(facts.mesh_ids),
        "deterministic": facts.deterministic,
        "warnings": list(facts.warnings),
        "counters": {
            **dict.fromkeys(("recoveries", "replayed_tokens", "hedges", "rejected_datagrams"), 0),
            **facts.counters,
        },
    }
