"""What one node's elector sees of the room: adverts, and what changed when.

Owns the two clocks that adverts alone do not tell: how long a free node has claimed nothing (then it is not waited for), and how
long a load has stood still (then it no longer counts).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshd.election.capacity import Device
from meshd.election.claims import Claim
from meshd.election.elect import order
from meshd.election.settings import Settings
from meshd.vocabulary import Advert, LayerRange, Loading, NodeId


@dataclass(frozen=True, slots=True)
class RoomView:
    """Adverts of everybody alive or suspect, this node's own among them; who is admitted here; who is suspect."""

    adverts: tuple[Advert, ...]
    admitted: frozenset[NodeId] = frozenset()
    suspects: frozenset[NodeId] = frozenset()


class Watch:
    """The newest `RoomView` of one model, with its history."""

    def __init__(self, me: NodeId, digest: str, settings: Settings) -> None:
        self._me, self._digest, self._settings = me, digest, settings
        self._adverts: dict[NodeId, Advert] = {}
        self._admitted: frozenset[NodeId] = frozenset()
        self._free_since: dict[NodeId, float] = {}
        self._load_since: dict[NodeId, tuple[Loading, float]] = {}
        self.mine: Advert | None = None
        self.suspects: frozenset[NodeId] = frozenset()

    def see(self, view: RoomView, now: float) -> bool:
        """Take over a view. True when somebody came, went or (somebody else) changed range."""
        before = {key: advert.layers for key, advert in self._adverts.items()}
        was_known = self.mine is not None
        self.mine = next((a for a in view.adverts if a.node_id == self._me), None)
        self._adverts = {
            a.node_id: a
            for a in view.adverts
            if a.node_id != self._me and a.digest in ("", self._digest) and not a.draining
        }
        self._admitted, self.suspects = view.admitted, view.suspects
        free = [key for key, a in self._adverts.items() if a.layers is None and a.loading is None]
        self._free_since = {key: self._free_since.get(key, now) for key in free}
        loads = {key: a.loading for key, a in self._adverts.items() if a.loading is not None}
        self._load_since = {
            key: known if (known := self._load_since.get(key)) and known[0] == loading else (loading, now)
            for key, loading in loads.items()
        }
        return was_known != (self.mine is not None) or before != {
            key: advert.layers for key, advert in self._adverts.items()
        }

    @property
    def present(self) -> frozenset[NodeId]:
        return frozenset(self._adverts)

    def device(self, layers: LayerRange | None) -> Device:
        """This node as a device that holds ``layers``."""
        assert self.mine is not None, "decisions wait for the own advert"  # noqa: S101 - checked by the elector
        return replace(Device.of(self.mine), layers=layers)

    def replicas(self) -> dict[NodeId, LayerRange]:
        """Admitted peers beyond suspicion and what they hold."""
        return {
            key: a.layers
            for key, a in sorted(self._adverts.items())
            if a.layers is not None and a.digest == self._digest and key in self._admitted and key not in self.suspects
        }

    def served(self) -> list[LayerRange]:
        """What the others hold now, proven here or not."""
        return [a.layers for a in self._adverts.values() if a.layers is not None and a.digest == self._digest]

    def others(self, claims: Iterable[Claim], *, started: bool, moving: bool, now: float) -> list[Device]:
        """The room without this node, as it will be: ranges held, being loaded, and claimed by whoever outranks this node."""
        claimed = {claim.node_id: claim for claim in claims}
        mine = (not started, moving, *order(self.device(None), self._settings))
        found: list[Device] = []
        for key, advert in sorted(self._adverts.items()):
            device = replace(Device.of(advert), layers=self._loading(key, now) or advert.layers)
            claim = claimed.get(key)
            if claim is not None:
                theirs = (claim.progress <= 0.0, claim.moving, *order(device, self._settings))
                if theirs < mine and claim.layers is not None:
                    device = replace(device, layers=claim.layers)
            elif device.layers is None and now - self._free_since.get(key, now) >= self._settings.idle_s:
                continue
            found.append(device)
        return found

    def _loading(self, key: NodeId, now: float) -> LayerRange | None:
        loading, since = self._load_since.get(key, (None, now))
        if loading is None or loading.stage == "claimed" or now - since >= self._settings.stalled_s:
            return None
        return loading.layers
