"""What this node says of itself: one pure function from what it is and holds to its advert."""

from __future__ import annotations

from dataclasses import dataclass

from meshd import __version__
from meshd.inference.engine import EngineInfo
from meshd.inference.keeper import Held
from meshd.node.electing import shown
from meshd.node.model import Served
from meshd.vocabulary import Advert, Capability, Endpoint, Loading, NodeId


@dataclass(frozen=True, slots=True)
class Self:
    """The facts that do not change while the daemon runs."""

    node_id: NodeId
    name: str
    epoch: int
    http: Endpoint
    device: str
    capacity_mb: int
    wire: int


def advert_of(
    me: Self,
    *,
    addresses: tuple[Endpoint, ...],
    served: Served | None,
    held: Held,
    claim: Loading | None,
    info: EngineInfo | None,
    entry: bool,
    draining: bool,
) -> Advert:
    """The advert as of now; gossip gives it its incarnation. Layers stand in it only while they can be run."""
    ready = info is not None and held.state == "ready"
    return Advert(
        node_id=me.node_id,
        name=me.name,
        epoch=me.epoch,
        incarnation=0,
        addresses=addresses,
        http=me.http,
        version=__version__,
        wire=me.wire,
        model=served.spec.name if served else "",
        digest=served.spec.digest if served else "",
        dtype=info.dtype if info else served.spec.dtype if served else "",
        arith=info.arith if info else "",
        num_layers=served.spec.num_layers if served else 0,
        layers=held.layers if ready else None,
        generation=info.generation if info else 0,
        loading=shown(held.loading, claim),
        capability=Capability(
            device=me.device,
            capacity_mb=me.capacity_mb,
            layer_ms_1=info.layer_ms_1 if info else 0.0,
            layer_ms_64=info.layer_ms_64 if info else 0.0,
        ),
        entry=entry,
        draining=draining,
    )
