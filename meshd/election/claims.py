"""Who says it will take which range: rumours that stand for a while and then either became layers or went away.

A claim settles who *takes* when several nodes see the same gap. It is valid for ``claim_valid_s`` after it was last heard,
is renewed by its owner, and is void when its progress stands still for ``stalled_s``, its owner is suspect, or a newer run of
the owner was heard of. Claims never count as held layers for a request.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshd.election.settings import Settings
from meshd.vocabulary import LayerRange, NodeId


@dataclass(frozen=True, slots=True)
class Claim:
    """``layers`` None withdraws. ``moving``: the owner leaves another range for it. ``progress`` 0 until loading begins."""

    node_id: NodeId
    epoch: int
    generation: int
    digest: str
    layers: LayerRange | None
    moving: bool = False
    progress: float = 0.0


@dataclass(slots=True)
class _Heard:
    claim: Claim
    heard_at: float
    progressed_at: float


class ClaimBook:
    """The newest claim of each node."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._heard: dict[NodeId, _Heard] = {}

    def receive(self, claim: Claim, now: float) -> None:
        """A claim from its owner. One of an older run changes nothing."""
        known = self._heard.get(claim.node_id)
        if known is not None and (claim.epoch, claim.generation) < (known.claim.epoch, known.claim.generation):
            return
        if claim.layers is None:
            # Kept, so that an older rumour of the same run still on its way does not bring the claim back.
            self._heard[claim.node_id] = _Heard(claim, now, now)
            return
        same = known is not None and known.claim.layers == claim.layers and known.claim.epoch == claim.epoch
        progressed = known is None or not same or claim.progress > known.claim.progress
        progressed_at = now if progressed or known is None else known.progressed_at
        self._heard[claim.node_id] = _Heard(claim, now, progressed_at)

    def standing(
        self, digest: str, present: Collection[NodeId], suspects: Collection[NodeId], now: float
    ) -> list[Claim]:
        """Claims that count now, of nodes that are there and not suspect."""
        self._heard = {key: heard for key, heard in self._heard.items() if now < self._ends(heard)}
        return [
            heard.claim
            for key, heard in sorted(self._heard.items())
            if heard.claim.layers is not None
            and heard.claim.digest == digest
            and key in present
            and key not in suspects
        ]

    def _ends(self, heard: _Heard) -> float:
        return min(heard.heard_at + self._settings.claim_valid_s, heard.progressed_at + self._settings.stalled_s)
